"""Bounded requests to a hub: lengths, ranges, redirects, tokens and pauses."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import httpx2
import pytest

from model.checkpoint import hub_transfer
from model.checkpoint.hub_metadata import MetadataError, RemoteFile, parse_model_info
from model.checkpoint.hub_transfer import TransferError, fetch_file, fetch_info, keeps_token, redirect_target
from tests.support.fake_hub import FakeHub, fake_hub
from tests.support.hostile_hub import redirects_to, with_body

FILE = RemoteFile(name="config.json", size=10, etag="0" * 40)
CONTENT = b"0123456789"
TOKEN = {"Authorization": "Bearer secret"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub whose answers the test writes."""
    monkeypatch.setattr(hub_transfer, "_PAUSES", (0.0, 0.0))
    with fake_hub() as running:
        yield running


def fetch(hub: FakeHub, answer: Callable[[BaseHTTPRequestHandler], None], present: bytes = b"") -> bytes:
    """The file's bytes after a transfer that continues with `present`."""
    hub.answers["/file"] = answer
    output = io.BytesIO(present)
    output.seek(0, io.SEEK_END)
    try:
        fetch_file(f"{hub.url}/file", {}, output, FILE)
    finally:
        assert len(output.getvalue()) <= FILE.size
    return output.getvalue()


def chunked(*parts: bytes) -> bytes:
    """A body in chunks."""
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def test_body_of_the_declared_size_is_taken(hub: FakeHub) -> None:
    assert fetch(hub, with_body("Content-Length: 10", body=CONTENT)) == CONTENT
    assert fetch(hub, with_body("Transfer-Encoding: chunked", body=chunked(CONTENT[:4], CONTENT[4:]))) == CONTENT
    assert fetch(hub, with_body(body=CONTENT)) == CONTENT
    packed = gzip.compress(CONTENT)  # as a proxy may do
    assert fetch(hub, with_body("Content-Encoding: gzip", f"Content-Length: {len(packed)}", body=packed)) == CONTENT


@pytest.mark.parametrize(
    "answer",
    [
        with_body("Content-Length: 11", body=CONTENT + b"x"),
        with_body("Content-Length: 9", body=CONTENT[:9]),
        with_body("Transfer-Encoding: chunked", body=chunked(CONTENT, b"x")),
        with_body("Transfer-Encoding: chunked", body=chunked(CONTENT[:9])),
        with_body(body=CONTENT + b"x"),
        with_body(body=CONTENT[:9]),
        with_body("Content-Encoding: gzip", body=gzip.compress(CONTENT * 1000)),
        with_body("Content-Length: 10", "Content-Range: bytes 0-9/10", body=CONTENT, status="206 Partial Content"),
    ],
)
def test_body_of_another_length_is_refused(hub: FakeHub, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
    with pytest.raises(TransferError, match=r"config\.json"):
        fetch(hub, answer)


def partial(length: int, content_range: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """A response with the end of the file."""
    headers = (f"Content-Length: {length}", f"Content-Range: {content_range}")
    return with_body(*headers, body=CONTENT[10 - length :], status="206 Partial Content")


def test_range_continues_only_where_the_file_ends(hub: FakeHub) -> None:
    assert fetch(hub, partial(6, "bytes 4-9/10"), CONTENT[:4]) == CONTENT
    assert fetch(hub, partial(6, "bytes 4-9/*"), CONTENT[:4]) == CONTENT
    assert fetch(hub, with_body("Content-Length: 10", body=CONTENT), b"abcd") == CONTENT  # it ignores ranges
    for wrong in (partial(7, "bytes 3-9/10"), partial(6, "bytes 4-9/11"), partial(5, "bytes 4-8/10"), partial(6, "")):
        with pytest.raises(TransferError, match="another range"):
            fetch(hub, wrong, CONTENT[:4])
    headers = ("Content-Range: bytes 4-9/10", "Content-Encoding: gzip")
    packed = with_body(*headers, body=gzip.compress(CONTENT[4:]), status="206 Partial Content")
    with pytest.raises(TransferError, match="compressed"):
        fetch(hub, packed, CONTENT[:4])


def test_redirects_lead_to_http_and_https_only_and_never_down() -> None:
    assert redirect_target("https://a/x/y", "/z") == "https://a/z"
    assert redirect_target("https://a/x", "https://user:word@b/?q=1#f") == "https://b/?q=1"
    assert redirect_target("http://a/x", "https://a/x") == "https://a/x"
    for location in ("", "file:///etc/passwd", "ftp://a/x", "javascript:1", "http://", "http://[::1", "http://a:b/"):
        with pytest.raises(TransferError, match="redirects to something"):
            redirect_target("http://a/x", location)
    with pytest.raises(TransferError, match="from https to http"):
        redirect_target("https://a/x", "http://169.254.169.254/latest/meta-data")


def test_token_stays_with_its_scheme_host_and_port() -> None:
    assert keeps_token("https://a/x", "https://a/y") and keeps_token("https://a/x", "https://a:443/y")
    assert keeps_token("http://a/x", "https://a/x")
    for target in ("https://b/x", "https://a.b/x", "https://a:8443/x", "http://a/x", "http://a:443/x"):
        assert not keeps_token("https://a/x", target)
    assert not keeps_token("http://a:8000/x", "https://a/x")


def test_token_that_was_dropped_does_not_come_back(hub: FakeHub) -> None:
    hub.answers["/first"] = redirects_to(f"{hub.storage}/second")
    hub.answers["/second"] = redirects_to(f"{hub.url}/third")
    hub.answers["/third"] = with_body("Content-Length: 2")
    assert fetch_info(f"{hub.url}/first", TOKEN, 100) == b"{}"
    assert [(request.path, request.token) for request in hub.requests] == [
        ("/first", "secret"), ("/second", ""), ("/third", "")
    ]  # fmt: skip


def test_redirects_are_counted(hub: FakeHub) -> None:
    hub.answers["/loop"] = redirects_to("/loop")
    with pytest.raises(TransferError, match="redirects more than 5 times"):
        fetch_info(f"{hub.url}/loop", TOKEN, 100)
    assert len(hub.requests) == 6


def test_info_of_the_limit_is_read_and_one_byte_more_is_refused(hub: FakeHub) -> None:
    hub.answers["/info"] = with_body("Transfer-Encoding: chunked", body=chunked(b"x" * 100))
    assert fetch_info(f"{hub.url}/info", {}, 100) == b"x" * 100
    with pytest.raises(TransferError, match="more than 99 bytes of model info"):
        fetch_info(f"{hub.url}/info", {}, 99)


@pytest.mark.parametrize(
    ("asked", "waited"),
    [("7", 7.0), ("999999999999", 300.0), ("-1", 0.0), ("\u00b2", 0.0), ("soon", 0.0), ("nan", 0.0)],
)
def test_pause_that_a_hub_asks_for_is_bounded(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, asked: str, waited: float
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(hub_transfer.time, "sleep", pauses.append)
    hub.answers["/info"] = with_body(f"Retry-After: {asked}", body=b"", status="429 Too Many Requests")
    with pytest.raises(httpx2.HTTPError):
        fetch_info(f"{hub.url}/info", {}, 100)
    assert pauses == [waited, waited]


def test_card_and_files_that_are_not_needed_may_be_anything() -> None:
    names = ("onnx/model.onnx", "模型\u3000x.txt", "odd name.safetensors", ".gitattributes", "config.json")
    files = [{"rfilename": name, "size": 3, "blobId": "a" * 40, "more": {"x": [1]}} for name in names]
    for card, base in (({"base_model": ["org/x", "org/y"]}, "org/x"), ({"base_model": 3}, ""), ([], ""), (None, "")):
        info = {"sha": "b" * 40, "siblings": files, "cardData": card, "tags": [1, None]}
        model = parse_model_info(json.dumps(info).encode())
        assert model.base_model == base
        assert [file.name for file in model.files] == ["config.json"]
        assert model.names == set(names) - {"onnx/model.onnx"}
    with pytest.raises(MetadataError, match="listed twice"):
        parse_model_info(json.dumps({"sha": "b" * 40, "siblings": [*files, files[0]]}).encode())
