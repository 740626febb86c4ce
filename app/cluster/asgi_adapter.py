"""Adapter in each replica: sends a gateway's request to the ASGI application of the same process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from app.cluster.messages import Accepted, Call, FullResponse, Head, ResponsePart
from app.http.request_log import AccessRecord


async def stream_response(app: ASGIApp, call: Call, replica: str) -> AsyncGenerator[ResponsePart, None]:
    """Yields the parts of the response. Closing it early is a client disconnect to the application."""
    yield Accepted(replica)
    buffer = _ResponseBuffer()
    is_body_sent = False

    async def receive() -> Message:
        nonlocal is_body_sent
        if is_body_sent:  # a disconnected client closes this generator
            await asyncio.Event().wait()
        is_body_sent = True
        return {"type": "http.request", "body": call.body, "more_body": False}

    task = asyncio.ensure_future(app(_scope(call), receive, buffer.send))
    task.add_done_callback(buffer.finish)
    try:
        while (part := await buffer.next_part()) is not None:
            yield part
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def full_response(app: ASGIApp, call: Call, replica: str) -> FullResponse:
    """Reads the whole response."""
    head, body = Head(500, ()), []
    async with aclosing(stream_response(app, call, replica)) as parts:
        async for part in parts:
            if isinstance(part, Head):
                head = part
            elif isinstance(part, bytes):
                body.append(part)
    return FullResponse(replica, head, b"".join(body))


def _scope(call: Call) -> Scope:
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": list(call.headers),
        "client": None,
        "server": None,
    }
    AccessRecord.get_or_create(scope).request_id = call.request_id
    return scope


class _ResponseBuffer:
    """Buffers the parts that the application sends until they are read; joins adjacent body chunks."""

    def __init__(self) -> None:
        self._parts: deque[Head | bytes] = deque()
        self._changed = asyncio.Event()
        self._is_complete = False

    async def send(self, message: Message) -> None:
        """The application's ASGI send()."""
        if message["type"] == "http.response.start":
            self._parts.append(Head(message["status"], tuple((bytes(k), bytes(v)) for k, v in message["headers"])))
        elif body := message.get("body"):
            self._parts.append(bytes(body))
        self._changed.set()

    def finish(self, _task: object) -> None:
        """Marks the end of the response."""
        self._is_complete = True
        self._changed.set()

    async def next_part(self) -> Head | bytes | None:
        """The next part; None after the last one."""
        while not self._parts and not self._is_complete:
            self._changed.clear()
            await self._changed.wait()
        if not self._parts:
            return None
        first = self._parts.popleft()
        chunks = [first] if isinstance(first, bytes) else []
        while chunks and self._parts and isinstance(self._parts[0], bytes):
            chunks.append(self._parts.popleft())  # type: ignore[arg-type]
        return b"".join(chunks) if chunks else first
