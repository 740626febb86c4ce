"""The service with clients that stop reading: blocks are freed, memory is bounded, the text is the same."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.completion_client import Event, parse_events, stream
from tests.support.http.raw_client import connect, post, read_all
from tests.support.model.tiny_models import tiny_weights
from tests.support.servers import Server, is_clean, start_server, stop_server

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 1.0, "seed": 5, "ignore_eos": True}
CHOICES: dict[str, Any] = {**LONG, "n": 3, "logprobs": 20, "max_tokens": 260}
ECHO: dict[str, Any] = {**LONG, "prompt": "Once upon a time " * 30, "n": 2, "echo": True, "logprobs": 20}
ECHO |= {"max_tokens": 300}
GUIDED: dict[str, Any] = {**LONG, "logprobs": 20, "max_tokens": 500, "regex": "([a-z]{3,9} )*"}


@pytest.fixture(scope="module")
def suspending_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model; connections whose readers rest are patient, and have small buffers."""
    weights = tiny_weights(tmp_path_factory.mktemp("long") / "tiny", context=4096)
    flags = ("--dtype", "float32", "--resume-seconds", "60")
    server = start_server(tmp_path_factory.mktemp("server"), weights, *flags)
    yield server
    assert stop_server(server) == 0
    assert "Traceback" not in server.log.read_text()


def _resting(server: Server, body: dict[str, Any]) -> socket.socket:
    """A stream whose client does not read, once it is suspended and the engine has no work for it.

    If the event loop gets no CPU for long, most of a stream may arrive at once at a waiting writer, and the service
    does not suspend it: try again.
    """
    before = server.metric("held_streams_total")
    for _ in range(20):
        connection = connect(server, receive_buffer=4096)
        connection.settimeout(60)
        connection.sendall(post(body, "/complete", "Connection: close"))
        # After the first token the engine has the request; it is idle once the stream is suspended or finished.
        assert server.wait_for(lambda connection=connection: b"event: token" in connection.recv(4096, socket.MSG_PEEK))
        assert is_clean(server)
        if server.metric("held_streams_total") > before:
            assert server.metric("held_streams_total") == before + 1
            return connection
        connection.close()
    raise AssertionError("no stream was suspended")


def _rest_of(connection: socket.socket) -> bytes:
    """Everything; through a small buffer it would take its time."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    return read_all(connection)


def _events(answer: bytes) -> list[Event]:
    """Of an answer in HTTP chunks, or as it is."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK"), head
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        whole, body = whole + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return parse_events(whole.decode())


def _output(events: list[Event]) -> dict[int, tuple[str, list[Any]]]:
    """Text and tokens of each choice."""
    output: dict[int, tuple[str, list[Any]]] = {}
    for event in events:
        if event.name == "token":
            text, tokens = output.get(event.data["index"], ("", []))
            output[event.data["index"]] = (text + event.data["text"], tokens + event.data.get("tokens", []))
    return output


def _assert_same(events: list[Event], expected: list[Event]) -> None:
    assert [event.name for event in events if event.name != "token"] == [
        event.name for event in expected if event.name != "token"
    ]
    assert _output(events) == _output(expected)
    assert events[-1].data["choices"] == expected[-1].data["choices"]
    assert events[-1].data["usage"]["completion_tokens"] == expected[-1].data["usage"]["completion_tokens"]


@pytest.mark.parametrize("body", [CHOICES, ECHO, GUIDED], ids=["choices", "echo", "guided"])
def test_what_a_reader_gets_who_rested_is_what_all_get(suspending_server: Server, body: dict[str, Any]) -> None:
    expected = stream(suspending_server.url, **body)
    with _resting(suspending_server, body) as connection:
        _assert_same(_events(_rest_of(connection)), expected)
    assert is_clean(suspending_server)


def test_a_held_stream_is_cancelled_or_resumed_as_any_other(suspending_server: Server) -> None:
    expected = stream(suspending_server.url, **CHOICES)
    for deed in ("cancel", "resume"):
        with _resting(suspending_server, CHOICES) as connection:
            # Only peek: reading resumes the stream, and it could finish before the DELETE arrives.
            head = connection.recv(300, socket.MSG_PEEK)
            name = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
            url = f"{suspending_server.url}/complete/{name}"
            if deed == "cancel":
                assert httpx.delete(url).status_code == 200
                choices = _events(_rest_of(connection))[-1].data["choices"]
                assert {choice["finish_reason"] for choice in choices} == {"cancelled"}
                continue
        events = parse_events(httpx.get(f"{url}/events", timeout=60).text)
        _assert_same(events, expected)
    assert is_clean(suspending_server)
