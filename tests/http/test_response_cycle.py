"""Framing of responses, and the ASGI extension with which a stream writes its parts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from app.http.flow_control import FlowControl
from app.http.response_cycle import ResponseCycle, body_writer, remove_writer
from tests.support.async_test import async_test
from tests.support.http.framing_harness import MemoryTransport

PLAIN = (b"content-type", b"text/plain")


class _Connection:
    """A cycle over memory; `writes` has what each call to the transport wrote."""

    def __init__(self, method: str = "GET", version: str = "1.1") -> None:
        self.output = bytearray()
        self.writes: list[bytes] = []
        self.n_complete = 0
        self.transport = MemoryTransport(self.output)
        write = self.transport.write
        self.transport.write = lambda data: (self.writes.append(bytes(data)), write(data))[1]  # type: ignore[method-assign]
        self.flow = FlowControl(self.transport, 60.0)
        self.scope: dict[str, Any] = {"method": method, "http_version": version}
        self.cycle = ResponseCycle(self.scope, self.transport, self.flow, self._complete, expects_continue=False)

    def _complete(self) -> None:
        self.n_complete += 1

    async def send(self, status: int, headers: list[tuple[bytes, bytes]], *parts: bytes) -> tuple[bytes, bytes]:
        """Sends a whole response; returns its head without the date, and what comes after."""
        await self.cycle.send({"type": "http.response.start", "status": status, "headers": headers})
        for part in parts[:-1]:
            await self.cycle.send({"type": "http.response.body", "body": part, "more_body": True})
        await self.cycle.send({"type": "http.response.body", "body": parts[-1]})
        head, _, body = bytes(self.output).partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines.pop(1).startswith(b"date: ")
        return b"\n".join(lines), body


@pytest.mark.parametrize(
    ("method", "version", "status", "headers", "parts", "head", "body"),
    [
        ("GET", "1.1", 200, [(b"Content-Length", b"5")], [b"he", b"llo"], b"content-length: 5", b"hello"),
        ("GET", "1.1", 200, [], [b"he", b"", b"o"], b"transfer-encoding: chunked", b"2\r\nhe\r\n1\r\no\r\n0\r\n\r\n"),
        ("GET", "1.1", 200, [], [b"he", b""], b"transfer-encoding: chunked", b"2\r\nhe\r\n0\r\n\r\n"),
        ("GET", "1.0", 200, [], [b"he", b"llo"], b"", b"hello"),
        ("HEAD", "1.1", 200, [(b"content-length", b"5")], [b"hello"], b"content-length: 5", b""),
        ("HEAD", "1.1", 200, [], [b"hello"], b"", b""),
        ("GET", "1.1", 204, [], [b""], b"", b""),
        ("GET", "1.1", 304, [(b"content-length", b"5")], [b""], b"content-length: 5", b""),
        ("GET", "1.1", 499, [(b"content-length", b"0")], [b""], b"content-length: 0", b""),
    ],
)
@async_test
async def test_response_is_framed_by_its_length_in_chunks_or_by_the_end_of_the_connection(
    method: str, version: str, status: int, headers: Any, parts: list[bytes], head: bytes, body: bytes
) -> None:
    connection = _Connection(method, version)
    got_head, got_body = await connection.send(status, headers, *parts)
    first, *fields = got_head.split(b"\n")
    assert first.startswith(b"HTTP/1.1 %d " % status)
    assert (b"\n".join(fields), got_body, connection.n_complete) == (head, body, 1)


@async_test
async def test_short_response_is_one_write() -> None:
    connection = _Connection()
    await connection.send(200, [PLAIN, (b"content-length", b"2")], b"hi")
    assert len(connection.writes) == 1


@async_test
async def test_head_of_a_stream_does_not_wait_for_its_first_part() -> None:
    connection = _Connection()
    await connection.cycle.send({"type": "http.response.start", "status": 200, "headers": [PLAIN]})
    assert connection.output.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("parts", [[b"hello!"], [b"hell"], [b"hello", b"!"]])
@async_test
async def test_body_of_another_length_than_declared_is_an_error(parts: list[bytes]) -> None:
    connection = _Connection()
    with pytest.raises(RuntimeError, match=r"longer|shorter"):
        await connection.send(200, [(b"content-length", b"5")], *parts)
    assert connection.n_complete == 0


@pytest.mark.parametrize(
    "header",
    [(b"x", b"a\r\nset-cookie: b"), (b"x", b"\0"), (b"x\r\ny", b"a"), (b"x y", b"a"), (b"transfer-encoding", b"gzip")],
)
@async_test
async def test_header_that_would_change_the_response_is_an_error(header: tuple[bytes, bytes]) -> None:
    connection = _Connection()
    with pytest.raises(RuntimeError):
        await connection.send(200, [PLAIN, header], b"")
    assert not connection.output and not connection.cycle.has_started


@pytest.mark.parametrize("value", [b"close", b"Close", b"keep-alive, close"])
@async_test
async def test_response_with_connection_close_closes(value: bytes) -> None:
    connection = _Connection()
    head, _ = await connection.send(200, [(b"connection", value), (b"content-length", b"0")], b"")
    assert connection.transport.is_closing() and head.count(b"connection") == 1


@async_test
async def test_last_response_of_a_connection_says_so() -> None:
    connection = _Connection()
    connection.cycle.keep_alive = False
    head, _ = await connection.send(200, [(b"content-length", b"0")], b"")
    assert head.endswith(b"connection: close") and connection.transport.is_closing()


@pytest.mark.parametrize("order", [["body"], ["start", "start"], ["start", "end", "body"], ["trailers"]])
@async_test
async def test_messages_out_of_order_are_errors(order: list[str]) -> None:
    connection = _Connection()
    messages: dict[str, Message] = {
        "start": {"type": "http.response.start", "status": 200, "headers": []},
        "body": {"type": "http.response.body", "body": b"x", "more_body": True},
        "end": {"type": "http.response.body", "body": b""},
        "trailers": {"type": "http.response.trailers", "headers": []},
    }
    for name in order[:-1]:
        await connection.cycle.send(messages[name])
    with pytest.raises(RuntimeError, match="unexpected ASGI message"):
        await connection.cycle.send(messages[order[-1]])


@async_test
async def test_extension_writes_parts_while_the_stream_is_open_and_its_client_reads() -> None:
    connection = _Connection()
    writer = body_writer(connection.scope)
    assert writer and not writer.is_ready
    await connection.cycle.send({"type": "http.response.start", "status": 200, "headers": [PLAIN]})
    assert writer.is_ready
    writer.write(b"hello")
    assert connection.output.endswith(b"\r\n\r\n5\r\nhello\r\n")
    connection.flow.is_write_paused = True
    assert not writer.is_ready
    connection.flow.is_write_paused = False
    await connection.cycle.send({"type": "http.response.body", "body": b""})
    assert not writer.is_ready and connection.output.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    ("method", "version", "length"), [("HEAD", "1.1", b""), ("GET", "1.0", b""), ("GET", "1.1", b"9")]
)
@async_test
async def test_extension_is_not_ready_where_there_are_no_chunks(method: str, version: str, length: bytes) -> None:
    connection = _Connection(method, version)
    headers = [(b"content-length", length)] if length else []
    await connection.cycle.send({"type": "http.response.start", "status": 200, "headers": headers})
    writer = body_writer(connection.scope)
    assert writer and not writer.is_ready


@async_test
async def test_disconnect_ends_the_extension_and_every_call() -> None:
    connection = _Connection()
    await connection.cycle.send({"type": "http.response.start", "status": 200, "headers": [PLAIN]})
    receiving = asyncio.ensure_future(connection.cycle.receive())
    await asyncio.sleep(0)
    n_written = len(connection.output)
    connection.cycle.disconnect()
    assert await receiving == {"type": "http.disconnect"} == await connection.cycle.receive()
    await connection.cycle.send({"type": "http.response.body", "body": b"x"})
    writer = body_writer(connection.scope)
    assert writer and not writer.is_ready and len(connection.output) == n_written


@async_test
async def test_middleware_removes_the_extension() -> None:
    scope = _Connection().scope
    assert body_writer(scope)
    for each in (scope, {"type": "http"}):
        remove_writer(each)
        assert body_writer(each) is None
