"""Control of benchmarks.service, which computes nothing: `python -m benchmarks.control_service STEP_MS`.

Each POST gets the frames of a native stream, one every STEP_MS milliseconds, all open streams at the same time, as an
engine's steps would. The load generator's cost here is its cost without a service.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import httptools
import msgspec

from app.common import event_loop

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_TOKEN = b'id: req-0123456789abcdef01234567:12\nevent: token\ndata: {"index": 0, "text": " token"}\n\n'
_DONE = (
    b'id: req-0123456789abcdef01234567:999\nevent: done\ndata: {"choices": [{"index": 0, "finish_reason": "length"}], '
    b'"usage": {"prompt_tokens": 1, "completion_tokens": %d, "total_tokens": %d}}\n\n'
)


class _Body(msgspec.Struct):
    max_tokens: int


class _Connection(asyncio.Protocol):
    """One client, which sends one request after the other."""

    def __init__(self, open_streams: set[_Connection]) -> None:
        self._open_streams = open_streams
        self._body = b""
        self._sent = self._max_tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def connection_lost(self, _: Exception | None) -> None:
        self._open_streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"GET":  # a probe
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        self._sent, self._max_tokens, self._body = 0, msgspec.json.decode(self._body, type=_Body).max_tokens, b""
        self._transport.write(_HEAD)
        self._open_streams.add(self)

    def write_token(self) -> None:
        """Writes a token, after the last one the end."""
        self._sent += 1
        self._transport.write(_chunk(_TOKEN))
        if self._sent >= self._max_tokens:
            self._open_streams.discard(self)
            self._transport.write(_chunk(_DONE % (self._sent, self._sent + 1)) + b"0\r\n\r\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(step_seconds: float) -> None:
    open_streams: set[_Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(open_streams), "127.0.0.1", 0)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    while True:
        due = loop.time() + step_seconds
        for connection in list(open_streams):
            connection.write_token()
        await asyncio.sleep(max(0.0, due - loop.time()))


if __name__ == "__main__":
    event_loop.run(_serve(float(sys.argv[1]) / 1e3))
