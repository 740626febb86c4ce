"""JSON answers of any size, encoded while they are written, so that a slow client costs little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.common.event_loop import TimeSlice
from app.common.fault_injection import is_armed
from app.http.sse import until_disconnect

_CHUNK_BYTES = 16 << 10


class Elements:
    """Stands in an answer for an array; `batches` makes its elements when they are written, some at a time."""

    def __init__(self, batches: Callable[[], Iterator[list[Any]]]) -> None:
        self.batches = batches


class Characters:
    """Stands in an answer for a string; `parts` makes it when it is written."""

    def __init__(self, parts: Callable[[], Iterator[str]]) -> None:
        self.parts = parts


class JsonStream(Response):
    """Sends `answer`: a short one with a Content-Length, a long one in chunks with a pause of `breather` between them.

    Calls `close` exactly once: when the kernel has taken the content, before a long answer's end is sent, or when the
    client has left.
    """

    media_type = "application/json"

    def __init__(
        self,
        answer: Mapping[str, Any],
        headers: Mapping[str, str],
        breather: TimeSlice,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._parts = _encoded(answer)
        self._breather = breather
        self._closing = ExitStack()
        self._closing.callback(close)

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it, at the pace of the client."""
        try:
            first, is_whole = _chunk(self._parts)
            if is_whole:
                self.headers["content-length"] = str(len(first))
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if is_whole:
                await send({"type": "http.response.body", "body": first, "more_body": False})
            else:
                await until_disconnect(self._send_chunks(first, send), receive)
        finally:
            self._closing.close()

    async def _send_chunks(self, chunk: bytes, send: Send) -> None:
        is_last = False
        while True:
            # Returns once the kernel has taken the chunk before this one.
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await self._breather.breathe()
            if is_last:
                break
            chunk, is_last = _chunk(self._parts)
        self._closing.close()  # before the client can send its next request, which must not find this one's slot taken
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _chunk(parts: Iterator[bytes]) -> tuple[bytes, bool]:
    """The next bytes of an answer, and whether they are the last."""
    most = float("inf") if is_armed("json_stream.at_once") else _CHUNK_BYTES
    chunk = bytearray()
    for part in parts:
        chunk += part
        if len(chunk) >= most:
            return bytes(chunk), False
    return bytes(chunk), True


def _encoded(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        start = b"{"
        for name, inner in value.items():
            yield start + msgspec.json.encode(name) + b":"
            yield from _encoded(inner)
            start = b","
        yield b"}" if value else b"{}"
    elif isinstance(value, list):
        yield b"["
        for place, inner in enumerate(value):
            if place:
                yield b","
            yield from _encoded(inner)
        yield b"]"
    elif isinstance(value, Elements):
        yield from _array(value.batches())
    elif isinstance(value, Characters):
        yield b'"'
        for part in value.parts():
            yield msgspec.json.encode(part)[1:-1]
        yield b'"'
    else:
        yield msgspec.json.encode(value)


def _array(batches: Iterator[list[Any]]) -> Iterator[bytes]:
    yield b"["
    is_first = True
    for batch in batches:
        if batch:
            yield (b"" if is_first else b",") + msgspec.json.encode(batch)[1:-1]
            is_first = False
    yield b"]"
