"""Idempotency-Key: a POST that a client or proxy sends again gets the response of the first one, and computes nothing.

The header is that of draft-ietf-httpapi-idempotency-key-header. A successful response is kept for a while after its
end; while it is being made, a second request gets 409. A native stream is resumed from its start instead, running or
cut, because the resume store has its events.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.auth import owner_of
from app.http.errors import ApiError
from app.http.request_log import record_of, respond
from app.http.sse import BODY_WRITER

_MAX_KEY_LENGTH = 255
_MAX_KEPT = 256
_Name = tuple[str, str, bytes]


@dataclass(slots=True, eq=False)
class _Exchange:
    """The first request with a key, and its response as far as it is kept."""

    digest: bytes
    """SHA-256 of the body."""
    messages: list[Message] = field(default_factory=list)
    size: int = 0
    stream_id: str = ""
    """Id of a native stream, by which the resume store knows it."""
    is_running: bool = True

    @property
    def is_repeatable(self) -> bool:
        """Whether the response is complete, or one that can be resumed."""
        last = self.messages[-1] if self.messages else {}
        return bool(self.stream_id) or (last.get("type") == "http.response.body" and not last.get("more_body", False))


class IdempotencyMiddleware:
    """ASGI middleware, inside authentication.

    Args:
        max_body_bytes: longer bodies go to the application as they are, which rejects them.
        replay_bytes: longer responses are not kept, unless they are native streams.
        seconds: how long a response is kept after its end; at most 256 are.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, replay_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_body_bytes, self._replay_bytes, self._seconds = max_body_bytes, replay_bytes, seconds
        self._exchanges: dict[_Name, _Exchange] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        values = [value for name, value in scope.get("headers", ()) if name == b"idempotency-key"]
        if not values or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if len(values) > 1 or not 0 < len(values[0]) <= _MAX_KEY_LENGTH:
            message = f"send one header Idempotency-Key of 1 to {_MAX_KEY_LENGTH} characters"
            await respond(request, _error(400, message))(scope, receive, send)
            return
        messages = await self._read_body(receive)
        receive = _replaying(messages, receive)
        if messages[-1].get("more_body", True):  # too long, or the client has disconnected
            await self._app(scope, receive, send)
            return
        digest = hashlib.sha256(b"".join(message["body"] for message in messages)).digest()
        name = owner_of(request), scope["path"], values[0]
        exchange = self._exchanges.get(name)
        if exchange is None:
            await self._run(name, _Exchange(digest), scope, receive, send)
        elif error := _reason_against(exchange, digest):
            await respond(request, error)(scope, receive, send)
        else:
            record_of(request).outcome = "replayed"
            await self._repeat(name, exchange, scope, receive, send)

    async def _read_body(self, receive: Receive) -> list[Message]:
        """The messages of the body, of which the last has `more_body` if it is too long."""
        messages: list[Message] = []
        size = 0
        while size <= self._max_body_bytes:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if not message.get("more_body", False):
                break
        return messages

    async def _run(self, name: _Name, exchange: _Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        self._exchanges[name] = exchange
        is_kept = bool(self._seconds)

        async def record(message: Message) -> None:
            nonlocal is_kept
            if message["type"] == "http.response.start":
                is_kept = is_kept and message["status"] < 300
                exchange.stream_id = _native_stream_id(scope, message) if is_kept else ""
            exchange.size += len(message.get("body", b""))
            if is_kept and not exchange.stream_id and exchange.size <= self._replay_bytes:
                exchange.messages.append(message)
            else:
                exchange.messages.clear()
            await send(message)

        scope.pop(BODY_WRITER, None)
        try:
            await self._app(scope, receive, record)
        finally:
            exchange.is_running = False
            if is_kept and exchange.is_repeatable:
                self._keep(name, exchange)
            else:
                self._forget(name, exchange)

    def _keep(self, name: _Name, exchange: _Exchange) -> None:
        asyncio.get_running_loop().call_later(self._seconds, self._forget, name, exchange)
        if len(self._exchanges) > _MAX_KEPT:
            oldest = next(name for name, each in self._exchanges.items() if not each.is_running)
            del self._exchanges[oldest]

    def _forget(self, name: _Name, exchange: _Exchange) -> None:
        if self._exchanges.get(name) is exchange:
            del self._exchanges[name]

    async def _repeat(self, name: _Name, exchange: _Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_repeated(message: Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] >= 300:  # of the resumption: the events are gone, and the key starts anew
                    self._forget(name, exchange)
                message = {**message, "headers": [*message["headers"], (b"idempotent-replayed", b"true")]}
            await send(message)

        if not exchange.stream_id:
            for message in exchange.messages:
                await send_repeated(message)
            return
        path = f"/complete/{exchange.stream_id}/events"
        resumption = {"method": "GET", "path": path, "raw_path": path.encode("ascii"), "query_string": b"after=-1"}
        inner = {**scope, **resumption}
        try:
            await self._app(inner, receive, send_repeated)
        finally:
            scope["route"] = inner.get("route")  # for the request log


def _native_stream_id(scope: Scope, start: Message) -> str:
    """The id of a native stream; empty for every other response."""
    headers = dict(start["headers"])
    is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
    return headers[b"x-request-id"].decode("ascii") if is_stream and scope["path"] == "/complete" else ""


def _reason_against(exchange: _Exchange, digest: bytes) -> ApiError | None:
    """Why a request with this body's digest gets no response of the first one."""
    if exchange.digest != digest:
        message = "this Idempotency-Key belongs to a request with another body: send each request with a new key"
        return _error(400, message, "idempotency_key_reused")
    if exchange.is_running and not exchange.stream_id:
        message = "the request with this Idempotency-Key is still running: send it again later"
        return _error(409, message, "idempotency_key_in_use")
    return None


def _error(status: int, message: str, code: str | None = None) -> ApiError:
    return ApiError(status, message, param="Idempotency-Key", code=code)


def _replaying(messages: list[Message], receive: Receive) -> Receive:
    """`receive` after these messages."""
    rest = iter(messages)

    async def replay() -> Message:
        return next(rest, None) or await receive()

    return replay
