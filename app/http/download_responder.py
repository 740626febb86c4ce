"""Answers on the listening socket while a model downloads: 200 for liveness probes, 503 for everything else.

The application, its limits and its engine start after the download; until then a thread reads the head of a request and
closes the connection with the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from app.http.errors import ApiError
from app.http.request_log import new_request_id

_RETRY_SECONDS = 5
_HEAD_BYTES = 1 << 14
_HEAD_SECONDS, _CLOSE_SECONDS = 10.0, 1.0
_MAX_CONNECTIONS = 256
_REASON = "the model is downloading: try again in a moment"
_PAGE = f'<!doctype html><meta http-equiv="refresh" content="{_RETRY_SECONDS}"><title>inkstream</title><p>{_REASON}</p>'


@contextlib.contextmanager
def answer_not_ready(listener: socket.socket) -> Iterator[None]:
    """Answers clients of `listener` inside the block; connections that are not accepted yet wait for the service."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(listener.dup(), stop)), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_CLOSE_SECONDS)


async def _serve(listener: socket.socket, stop: threading.Event) -> None:
    connections: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.ensure_future(_answer(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, sock=listener, limit=_HEAD_BYTES)
    await asyncio.to_thread(stop.wait)
    server.close()
    for task in connections:
        task.cancel()
    await asyncio.gather(*connections, return_exceptions=True)
    await asyncio.sleep(0)  # lets the sockets close


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request of a connection."""
    errors = (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError)
    try:
        with contextlib.suppress(*errors):
            async with asyncio.timeout(_HEAD_SECONDS):
                writer.write(_response(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
                writer.write_eof()
            async with asyncio.timeout(_CLOSE_SECONDS):  # closed with unread data, a socket would drop the answer
                while await reader.read(_HEAD_BYTES):
                    pass
    finally:
        writer.close()


def _response(head: bytes) -> bytes:
    """The whole response to a request with this head."""
    method, _, rest = head.partition(b" ")
    path = rest.split(b" ")[0].split(b"?")[0]
    status, headers = (
        "503 Service Unavailable",
        {"Retry-After": str(_RETRY_SECONDS), "Content-Type": "application/json"},
    )
    if path == b"/health/live":
        status, body = "200 OK", _json({"status": "live"})
    elif path in (b"/health", b"/health/ready"):
        body = _json({"status": "not ready", "phase": "downloading"})
    elif path == b"/" and b"text/html" in head:
        headers["Content-Type"], body = "text/html; charset=utf-8", _PAGE.encode()
    else:
        request_id = new_request_id()
        headers["X-Request-Id"], body = request_id, _json(ApiError(503, _REASON).body(request_id))
    headers |= {"Content-Length": str(len(body)), "Connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + (b"" if method == b"HEAD" else body)


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()
