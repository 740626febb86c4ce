"""Runs an ASGI application for one request in this process; each replica uses it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from app.cluster.messages import Call, Head, Part, Taken, Whole
from app.http.access_record import AccessRecord


async def answer(app: ASGIApp, call: Call, replica: str) -> AsyncGenerator[Part, None]:
    """Yields the response's parts. Closing it early is a client disconnect to the application."""
    yield Taken(replica)
    outbox = _Outbox()
    asked = False

    async def receive() -> Message:
        nonlocal asked
        if asked:  # a disconnected client closes this generator
            await asyncio.Event().wait()
        asked = True
        return {"type": "http.request", "body": call.body, "more_body": False}

    work = asyncio.ensure_future(app(_scope(call), receive, outbox.send))
    work.add_done_callback(outbox.end)
    try:
        while (part := await outbox.take()) is not None:
            yield part
        work.result()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def whole(app: ASGIApp, call: Call, replica: str) -> Whole:
    """The whole response."""
    head, body = Head(500, ()), []
    async with aclosing(answer(app, call, replica)) as parts:
        async for part in parts:
            if isinstance(part, Head):
                head = part
            elif isinstance(part, bytes):
                body.append(part)
    return Whole(replica, head, b"".join(body))


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
    AccessRecord.begin_in(scope).request_id = call.request_id
    return scope


class _Outbox:
    """Buffers response parts that the application has sent until they are taken; joins adjacent body chunks."""

    def __init__(self) -> None:
        self._parts: deque[Head | bytes] = deque()
        self._news = asyncio.Event()
        self._is_over = False

    async def send(self, message: Message) -> None:
        """The application's ASGI send()."""
        if message["type"] == "http.response.start":
            self._parts.append(Head(message["status"], tuple((bytes(k), bytes(v)) for k, v in message["headers"])))
        elif body := message.get("body"):
            self._parts.append(bytes(body))
        self._news.set()

    def end(self, _work: object) -> None:
        """Marks the end of the response."""
        self._is_over = True
        self._news.set()

    async def take(self) -> Head | bytes | None:
        """The next part; None after the last one."""
        while not self._parts and not self._is_over:
            self._news.clear()
            await self._news.wait()
        if not self._parts:
            return None
        first = self._parts.popleft()
        pieces = [first] if isinstance(first, bytes) else []
        while pieces and self._parts and isinstance(self._parts[0], bytes):
            pieces.append(self._parts.popleft())  # type: ignore[arg-type]
        return b"".join(pieces) if pieces else first
