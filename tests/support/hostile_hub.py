"""What a hostile hub or mirror answers: model info that lies, and bodies that are too long, too slow or elsewhere."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.fake_hub import FakeHub

Info = dict[str, Any]
Handler = BaseHTTPRequestHandler
_MEGABYTE = b"x" * (1 << 20)


def _with(**fields: Any) -> Callable[[Info], Any]:
    return lambda info: {**info, **fields}


def _config(**fields: Any) -> Callable[[Info], Any]:
    """Other values in the entry of config.json."""

    def change(info: Info) -> Info:
        files = [{**file, **fields} if file["rfilename"] == "config.json" else file for file in info["siblings"]]
        return {**info, "siblings": files}

    return change


def _weights(**fields: Any) -> Callable[[Info], Any]:
    """Other values in the LFS entry of the weights."""

    def change(info: Info) -> Info:
        files = [{**file, "lfs": {**file["lfs"], **fields}} if "lfs" in file else file for file in info["siblings"]]
        return {**info, "siblings": files}

    return change


def _also(name: Any) -> Callable[[Info], Any]:
    """One more file, of this name."""
    entry = {"rfilename": name, "size": 1, "blobId": "0" * 40}
    return lambda info: {**info, "siblings": [*info["siblings"], entry]}


def _text(old: str, new: str) -> Callable[[Info], Any]:
    return lambda info: json.dumps(info).replace(old, new, 1).encode()


METADATA: Mapping[str, Callable[[Info], Any]] = {
    **{
        f"sha {sha!r:.40}": _with(sha=sha)
        for sha in (
            "../../../evil", "/tmp/evil", "..", "", "a" * 39, "A" * 40, "a" * 40 + "\n", "a" * 41, "main", "a/b",
            "a" * 39 + "\0", None, 9, True, ["a" * 40], {"a": 1}, "\uff11" * 40,
        )
    },
    **{
        f"blobId {blob!r:.40}": _config(blobId=blob)
        for blob in ("../../evil", "/tmp/evil", "", "a" * 39, "a" * 64, "A" * 40, None, 9, True, ["a"], "a" * 100_000)
    },
    **{
        f"size {size!r:.40}": _config(size=size)
        for size in ("9", -1, True, 1.5, None, [], 10**30, 1 << 62, (64 << 20) + 1, "NaN")
    },
    **{f"lfs.sha256 {sha!r:.40}": _weights(sha256=sha) for sha in ("../evil", "a" * 63, "", None, 7, "A" * 64)},
    **{f"lfs.size {size!r:.40}": _weights(size=size) for size in ("9", -1, True, 1e300, None, 1, 1 << 62)},
    **{
        f"file {name!r:.40}": _also(name)
        for name in (
            "../evil.safetensors", "/etc/evil.json", "a/../../evil", "./config.json", "a\\..\\evil", "a\0b", "a\nb",
            "a//b", "", "config.json", "x" * 256, "a/" * 600 + "b", None, 3, ["config.json"], "\ud800", "trailing/",
        )
    },
    **{f"siblings {value!r:.40}": _with(siblings=value) for value in (None, {}, "config.json", [3], [None], [[]])},
    "siblings missing": lambda info: {name: value for name, value in info.items() if name != "siblings"},
    "lfs is text": lambda info: {**info, "siblings": [{**file, "lfs": "x"} for file in info["siblings"]]},
    "100,000 files": lambda info: {
        **info, "siblings": [*info["siblings"], *({"rfilename": f"f{n}", "size": 1} for n in range(100_000))]
    },
    "deep nesting": _text('"cardData"', '"x": ' + "[" * 100_000 + "]" * 100_000 + ', "cardData"'),
    "deep card": _text('"cardData": {', '"cardData": {"base_model": ' + "[" * 100_000 + "]" * 100_000 + ", "),
    "NaN": _text('"cardData"', '"x": NaN, "cardData"'),
    "not UTF-8": lambda info: json.dumps(info).encode() + b"\xff",
    "a list": lambda info: [info],
    "null": lambda _: None,
    "cut": lambda info: json.dumps(info).encode()[:-9],
    "HTML": lambda _: b"<html>",
    "empty": lambda _: b"",
    "64 MB": lambda info: json.dumps(info).encode() + b" " * (64 << 20),
}  # fmt: skip
"""Model info that no hub sends, by what is wrong."""


def _head(handler: Handler, *headers: str, status: str = "200 OK") -> None:
    handler.wfile.write("\r\n".join([f"HTTP/1.1 {status}", *headers, "Connection: close", "\r\n"]).encode())


def _chunks(handler: Handler, chunk: bytes, count: int) -> None:
    part = b"%x\r\n%s\r\n" % (len(chunk), chunk)
    for _ in range(count):
        handler.wfile.write(part)


def endless(handler: Handler) -> None:
    """Up to 400 MB without a length."""
    _head(handler, "Transfer-Encoding: chunked")
    _chunks(handler, _MEGABYTE, 400)


@cache
def _bomb() -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS | 16)
    return b"".join([*(packer.compress(_MEGABYTE) for _ in range(200)), packer.flush()])


def gzip_bomb(handler: Handler) -> None:
    """200 KB that become 200 MB."""
    content = _bomb()
    _head(handler, f"Content-Length: {len(content)}", "Content-Encoding: gzip")
    handler.wfile.write(content)


def long_error(handler: Handler) -> None:
    """An error of up to 400 MB."""
    _head(handler, "Transfer-Encoding: chunked", status="404 Not Found")
    _chunks(handler, _MEGABYTE, 400)


def long_redirect(handler: Handler) -> None:
    """A redirect to itself with a body of up to 400 MB."""
    _head(handler, f"Location: {handler.path}", "Transfer-Encoding: chunked", status="302 Found")
    _chunks(handler, _MEGABYTE, 400)


def long_headers(handler: Handler) -> None:
    """Headers of up to 400 MB."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(400):
        handler.wfile.write(b"X-Long: %s\r\n" % _MEGABYTE)


def redirects_to(location: str) -> Callable[[Handler], None]:
    """A redirect there."""
    return lambda handler: _head(handler, f"Location: {location}", "Content-Length: 0", status="302 Found")


def with_body(*headers: str, body: bytes = b"{}", status: str = "200 OK") -> Callable[[Handler], None]:
    """A response of these bytes."""

    def answer(handler: Handler) -> None:
        _head(handler, *headers, status=status)
        handler.wfile.write(body)

    return answer


def slow_head(handler: Handler) -> None:
    """One byte of a header at a time, for a minute."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    _trickle(handler)


def slow_body(handler: Handler) -> None:
    """One byte of the body at a time, for a minute."""
    _head(handler, "Transfer-Encoding: chunked")
    handler.wfile.write(b"1;")  # an extension of a chunk, so that the client's library yields nothing
    _trickle(handler)


def _trickle(handler: Handler) -> None:
    for _ in range(1200):
        handler.wfile.write(b"a")
        time.sleep(0.05)


BODIES: Mapping[str, Callable[[Handler], None]] = {
    "endless": endless,
    "gzip bomb": gzip_bomb,
    "long error": long_error,
    "long redirect": long_redirect,
    "long headers": long_headers,
    "redirect loop": lambda handler: redirects_to(handler.path)(handler),
    "redirect to a file": redirects_to("file:///etc/passwd"),
    "redirect to ftp": redirects_to("ftp://127.0.0.1/x"),
    "redirect to nothing": redirects_to(""),
    "redirect to no URL": redirects_to("http://[::1"),
    "redirect to a bad port": redirects_to("http://127.0.0.1:99999999/x"),
    "no content": with_body(status="204 No Content", body=b""),
    "a range that was not requested": with_body(
        "Content-Length: 2", "Content-Range: bytes 0-1/2", status="206 Partial Content"
    ),
    "negative length": with_body("Content-Length: -5"),
    "two lengths": with_body("Content-Length: 2", "Content-Length: 3"),
    "five encodings": with_body(f"Content-Encoding: {', '.join(['gzip'] * 9)}", "Content-Length: 2"),
    "broken gzip": with_body("Content-Encoding: gzip", "Content-Length: 2"),
    "not HTTP": lambda handler: handler.wfile.write(b"SSH-2.0-x\r\n\r\n") and None,
}
"""Responses that no hub sends, to a request for model info or for a file."""


def install(hub: FakeHub, files: Mapping[str, bytes]) -> dict[str, str]:
    """Gives the hub one repository for each case; returns repository -> what is wrong there."""
    cases: dict[str, str] = {}

    def add(what: str) -> str:
        name = f"org/case-{len(cases)}"
        hub.repositories[name], cases[name] = dict(files), what
        return name

    for what, change in METADATA.items():
        hub.changes[add(what)] = change
    for what, answer in BODIES.items():
        hub.answers[f"/api/models/{add(f'info: {what}')}/"] = answer
        hub.answers[f"/{add(f'config.json: {what}')}/resolve/{hub.commit('org/case-0')}/config.json"] = answer
        hub.answers[f"/{add(f'weights: {what}')}/resolve/{hub.commit('org/case-0')}/model.safetensors"] = answer
    return cases
