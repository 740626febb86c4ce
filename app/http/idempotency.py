"""Idempotency-Key: a POST that a client or proxy sends again joins the first one, or gets its response again.

The header is that of draft-ietf-httpapi-idempotency-key-header. Requests of one owner to one path with the same key
share one exchange with the application: every connection gets the same bytes, from the start. The exchange is cancelled
like any request when its last connection closes; its successful response is kept for a while after its end.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.http.auth import owner_of
from app.http.errors import ApiError
from app.http.request_log import record_of, respond
from app.http.sse import until_disconnect

_MAX_KEY_LENGTH = 255
_MAX_FINISHED = 256
_Name = tuple[str, str, bytes]


class IdempotencyMiddleware:
    """ASGI middleware, inside authentication.

    Args:
        max_body_bytes: longer bodies go to the application as they are, which rejects them.
        replay_bytes: longer responses are not kept: a request with such a key gets 409 while it runs, later a new one.
        seconds: how long a finished response is kept; at most 256 are.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, replay_bytes: int, seconds: float) -> None:
        self._app = app
        self._max_body_bytes, self._replay_bytes, self._seconds = max_body_bytes, replay_bytes, seconds
        self._exchanges: dict[_Name, _Exchange] = {}
        self._finished: OrderedDict[_Name, asyncio.TimerHandle] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        values = [value for name, value in scope.get("headers", ()) if name == b"idempotency-key"]
        if not values or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if len(values) > 1 or not 0 < len(values[0]) <= _MAX_KEY_LENGTH:
            message = f"send one header Idempotency-Key of 1 to {_MAX_KEY_LENGTH} characters"
            await respond(request, ApiError(400, message, param="Idempotency-Key"))(scope, receive, send)
            return
        messages = await self._read_body(receive)
        if messages[-1].get("more_body", True):  # too long, or the client has disconnected
            await self._app(scope, _replaying(messages, receive), send)
            return
        digest = hashlib.sha256(b"".join(message["body"] for message in messages)).digest()
        name = owner_of(request), scope["path"], values[0]
        if exchange := self._exchanges.get(name):
            if error := exchange.reason_against(digest):
                await respond(request, error)(scope, receive, send)
                return
            record_of(request).outcome = "replayed"
            scope["route"] = exchange.scope.get("route")  # for the request log
            send = _with_header(send, (b"idempotent-replayed", b"true"))
        else:
            exchange = _Exchange(self._app, scope, messages, digest, self._replay_bytes)
            self._exchanges[name] = exchange
        try:
            await until_disconnect(exchange.deliver(send), receive)
        finally:
            if not exchange.positions:
                await self._release(name, exchange)

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

    async def _release(self, name: _Name, exchange: _Exchange) -> None:
        """Called when the last connection is gone: keeps a complete response, cancels an incomplete one."""
        self._forget(name)
        if exchange.is_repeatable and self._seconds:
            self._exchanges[name] = exchange
            self._finished[name] = asyncio.get_running_loop().call_later(self._seconds, self._forget, name)
            if len(self._finished) > _MAX_FINISHED:
                self._forget(next(iter(self._finished)))
        else:
            await exchange.cancel()

    def _forget(self, name: _Name) -> None:
        self._exchanges.pop(name, None)
        if timer := self._finished.pop(name, None):
            timer.cancel()


class _Exchange:
    """One run of the application, whose response any number of connections read; it waits for the slowest."""

    def __init__(self, app: ASGIApp, scope: Scope, body: list[Message], digest: bytes, replay_bytes: int) -> None:
        self.scope = scope
        self.positions: dict[object, int] = {}
        """How many messages each connection has sent."""
        self._digest = digest
        self._body = body
        self._bytes_left = replay_bytes
        self._messages: list[Message] = []
        self._n_messages = 0
        """How many there were; those kept are the last of them."""
        self._changed = asyncio.Event()
        self._is_cancelled = asyncio.Event()
        self._task = asyncio.ensure_future(app(scope, _replaying(body, self._wait_cancelled), self._send))
        self._task.add_done_callback(self._notify)

    @property
    def is_repeatable(self) -> bool:
        """Whether the response is complete, kept from its start, and one that a retry would not change."""
        messages = self._messages
        is_complete = self._can_replay and bool(messages) and not messages[-1].get("more_body", False)
        return is_complete and messages[0].get("status", 500) < 300 and messages[-1]["type"] == "http.response.body"

    def reason_against(self, digest: bytes) -> ApiError | None:
        """Why a request with this body's digest cannot join."""
        if digest != self._digest:
            message = "this Idempotency-Key belongs to a request with another body: send each request with a new key"
            return ApiError(400, message, param="Idempotency-Key", code="idempotency_key_reused")
        if not self._can_replay:
            message = "the request with this Idempotency-Key is still running, and its response is too long to repeat"
            return ApiError(409, message, param="Idempotency-Key", code="idempotency_key_in_use")
        return None

    async def deliver(self, send: Send) -> None:
        """Sends the response from its start. Raises what the application raised."""
        connection = object()
        self.positions[connection] = position = 0
        try:
            while not self._task.done() or position < self._n_messages:
                if position == self._n_messages:
                    await self._changed.wait()
                    continue
                await send(self._messages[position - self._n_messages])
                position = self.positions[connection] = position + 1
                self._notify()
        finally:
            del self.positions[connection]
            self._notify()
        self._task.result()

    async def cancel(self) -> None:
        """Tells the application that the client has disconnected, and waits for its end."""
        self._is_cancelled.set()
        self._notify()
        await asyncio.wait([self._task])

    @property
    def _can_replay(self) -> bool:
        return len(self._messages) == self._n_messages

    async def _wait_cancelled(self) -> Message:
        await self._is_cancelled.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._messages.append(message)
        self._n_messages += 1
        self._bytes_left -= len(message.get("body", b""))
        self._notify()
        while not self._is_cancelled.is_set() and any(sent < self._n_messages for sent in self.positions.values()):
            await self._changed.wait()
        if self._bytes_left < 0:
            self._messages.clear()

    def _notify(self, _: object = None) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _replaying(messages: list[Message], receive: Receive) -> Receive:
    """`receive` after these messages."""
    rest = iter(messages)

    async def replay() -> Message:
        return next(rest, None) or await receive()

    return replay


def _with_header(send: Send, header: tuple[bytes, bytes]) -> Send:
    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], header]}
        await send(message)

    return send_with_header
