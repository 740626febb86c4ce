"""Idempotency-Key: a POST that a client or proxy sends again joins the first one, or gets its response again.

The header is that of draft-ietf-httpapi-idempotency-key-header. Requests of one owner to one path with the same key
share one exchange with the application: every connection gets the same bytes, from the start. The exchange is cancelled
like any request when its last connection closes; its successful response is kept for a while after its end. A native
stream that was cut is resumed from its start by the next request with its key, instead of being computed again.

What is repeated costs no tokens, but it is a request: `Quotas` counts it. An owner with many responses evicts its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from typing import NamedTuple, Protocol

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access.owner_shares import OwnerShares
from app.common.errors import EngineError, RateLimitExceeded
from app.http.auth import owner_of
from app.http.errors import ApiError, from_engine
from app.http.incoming_bodies import IncomingBodies
from app.http.request_body import body_read_before
from app.http.request_log import record_of, respond
from app.http.response_cycle import without_writer
from app.http.sse import until_disconnect

_MAX_KEY_LENGTH = 255
_MAX_FINISHED = 256
_MAX_CUT = 256
_TRY_AGAIN = (429, 503)
"""Statuses of a resumption that may succeed later."""
_Name = tuple[str, str, bytes]
"""Owner, path, and value of the header."""


class Quotas(Protocol):
    """Counts the requests that the middleware answers itself; each method raises RateLimitExceeded."""

    def check(self, request: Request) -> None:
        """Requires that there is a request left, before the body is read."""

    def repeated(self, request: Request) -> AbstractContextManager[object]:
        """Counts a request that gets a finished response, and is concurrent inside the block."""

    def joined(self, request: Request) -> None:
        """Counts a request that joins one that is running."""


class _Cut(NamedTuple):
    """A native stream whose client is away."""

    digest: bytes
    """Of the request's body."""
    stream_id: str
    timer: asyncio.TimerHandle


class IdempotencyMiddleware:
    """ASGI middleware, inside authentication.

    Args:
        bodies: memory for bodies that are arriving.
        max_body_bytes: longer bodies get 413.
        replay_bytes: longer responses are not kept: a request with such a key gets 409 while it runs, later a new one.
        seconds: how long a finished response is kept; at most 256 are, and each owner has a share.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        bodies: IncomingBodies,
        max_body_bytes: int,
        replay_bytes: int,
        seconds: float,
        quotas: Quotas,
    ) -> None:
        self._app, self._bodies, self._quotas = app, bodies, quotas
        self._max_body_bytes, self._replay_bytes, self._seconds = max_body_bytes, replay_bytes, seconds
        self._exchanges: dict[_Name, _Exchange] = {}
        self._finished: dict[_Name, asyncio.TimerHandle] = {}
        self._finished_shares = OwnerShares[_Name](_MAX_FINISHED)
        self._cut: dict[_Name, _Cut] = {}
        self._cut_shares = OwnerShares[_Name](_MAX_CUT)

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
        await self._once(values[0], scope, receive, send)

    async def _once(self, key: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        async with AsyncExitStack() as stack:
            try:
                self._quotas.check(request)
                reading = body_read_before(scope, receive, self._max_body_bytes, self._bodies)
                body = await stack.enter_async_context(reading)
            except (ApiError, EngineError) as error:
                await _refuse(request, error, scope, receive, send)
                return
            digest = hashlib.sha256(body).digest()
            name = owner_of(request), scope["path"], key
            cut = self._cut.get(name)
            exchange = self._exchanges.get(name)
            known = cut.digest if cut else digest
            if reason := exchange.reason_against(digest) if exchange else _reason_against(known, digest):
                await respond(request, reason)(scope, receive, send)
                return
            if exchange or cut:
                body.clear()
                await stack.aclose()
                record_of(request).outcome = "replayed"
                send = _with_header(send, (b"idempotent-replayed", b"true"))
            try:
                if name in self._finished:
                    stack.enter_context(self._quotas.repeated(request))
                elif exchange:
                    self._quotas.joined(request)
            except RateLimitExceeded as refused:
                await _refuse(request, refused, scope, receive, send)
                return
            if exchange is None:
                inner = _resumption(scope, cut.stream_id) if cut else scope
                exchange = _Exchange(self._app, inner, bytes(body), digest, self._replay_bytes)
                body.clear()
                exchange.resumed_id = cut.stream_id if cut else ""
                self._exchanges[name] = exchange
            try:
                await until_disconnect(exchange.deliver(send), receive)
            finally:
                scope["route"] = exchange.scope.get("route")  # for the request log
                if not exchange.positions:
                    await self._release(name, exchange)

    async def _release(self, name: _Name, exchange: _Exchange) -> None:
        """Called when the last connection is gone: keeps a complete response, cancels an incomplete one."""
        if self._exchanges.get(name, exchange) is not exchange:  # it was evicted, and another request took its place
            await exchange.cancel()
            return
        self._forget(name)
        owner, timer = name[0], partial(asyncio.get_running_loop().call_later, self._seconds, self._forget, name)
        if exchange.is_repeatable and self._seconds:
            exchange.keep()
            self._exchanges[name], self._finished[name] = exchange, timer()
            self._finished_shares.add(owner, name)
            if self._finished_shares.is_exceeded:
                self._forget(next(iter(self._finished_shares.largest)))
            return
        if (stream_id := exchange.native_stream_id) and self._seconds:
            self._cut[name] = _Cut(exchange.digest, stream_id, timer())
            self._cut_shares.add(owner, name)
            if self._cut_shares.is_exceeded:
                self._forget(next(iter(self._cut_shares.largest)))
        await exchange.cancel()

    def _forget(self, name: _Name) -> None:
        self._exchanges.pop(name, None)
        if timer := self._finished.pop(name, None):
            timer.cancel()
            self._finished_shares.discard(name[0], name)
        if cut := self._cut.pop(name, None):
            cut.timer.cancel()
            self._cut_shares.discard(name[0], name)


class _Exchange:
    """One run of the application, whose response any number of connections read; it waits for the fastest of them.

    Up to `replay_bytes` of the response are kept. A connection that falls further behind than that ends incomplete.
    """

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes, digest: bytes, replay_bytes: int) -> None:
        self.scope = without_writer(scope)
        self.digest = digest
        self.positions: dict[object, int] = {}
        """How many messages each connection has sent."""
        self.resumed_id = ""
        """The id of the stream that the exchange resumes, if any."""
        self._replay_bytes = replay_bytes
        self._head: Message = {}
        self._messages: deque[Message] = deque()
        self._first = 0
        """The number of the first message that is kept."""
        self._size = 0
        self._can_replay = True
        self._changed = asyncio.Event()
        self._is_cancelled = asyncio.Event()
        self._task = asyncio.ensure_future(app(self.scope, _replaying(body, self._wait_cancelled), self._send))
        self._task.add_done_callback(self._notify)

    @property
    def is_repeatable(self) -> bool:
        """Whether the response is complete, kept from its start, and one that a retry would not change."""
        if not self._can_replay or self._head.get("status", 500) >= 300:
            return False
        return self._messages[-1]["type"] == "http.response.body" and not self._messages[-1].get("more_body", False)

    @property
    def native_stream_id(self) -> str:
        """The id by which the resume store knows this stream; empty for every other response."""
        if self.resumed_id and self._head.get("status") in _TRY_AGAIN:
            return self.resumed_id
        headers = dict(self._head.get("headers", ()))
        is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        is_native = self.scope["path"].startswith("/complete")
        return headers.get(b"x-request-id", b"").decode("ascii") if is_stream and is_native else ""

    def keep(self) -> None:
        """Drops what a finished exchange no longer needs: the request's headers may be larger than the response."""
        self.scope = {name: self.scope[name] for name in ("path", "route") if name in self.scope}

    def reason_against(self, digest: bytes) -> ApiError | None:
        """Why a request with this body's digest cannot join."""
        if self._can_replay or digest != self.digest:
            return _reason_against(self.digest, digest)
        message = "the request with this Idempotency-Key is still running, and its response is too long to repeat"
        return ApiError(409, message, param="Idempotency-Key", code="idempotency_key_in_use")

    async def deliver(self, send: Send) -> None:
        """Sends the response from its start. Raises what the application raised."""
        connection = object()
        self.positions[connection] = position = 0
        try:
            while not self._task.done() or position < self._end:
                if position == self._end:
                    await self._changed.wait()
                    continue
                if position < self._first:
                    return
                await send(self._messages[position - self._first])
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
    def _end(self) -> int:
        return self._first + len(self._messages)

    async def _wait_cancelled(self) -> Message:
        await self._is_cancelled.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self._head = self._head or message
        self._messages.append(message)
        self._size += len(message.get("body", b""))
        self._notify()
        end = self._end
        while not self._is_cancelled.is_set() and all(sent < end for sent in self.positions.values()):
            await self._changed.wait()
        self._can_replay = self._can_replay and self._size <= self._replay_bytes
        slowest = min(self.positions.values(), default=end)
        while not self._can_replay and self._messages and (self._first < slowest or self._size > self._replay_bytes):
            self._size -= len(self._messages.popleft().get("body", b""))
            self._first += 1

    def _notify(self, _: object = None) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _reason_against(known: bytes, digest: bytes) -> ApiError | None:
    """The error for a key that was sent with another body before."""
    if known == digest:
        return None
    message = "this Idempotency-Key belongs to a request with another body: send each request with a new key"
    return ApiError(400, message, param="Idempotency-Key", code="idempotency_key_reused")


async def _refuse(request: Request, error: ApiError | EngineError, scope: Scope, receive: Receive, send: Send) -> None:
    response = respond(request, error if isinstance(error, ApiError) else from_engine(error))
    await response(scope, receive, send)


def _resumption(scope: Scope, stream_id: str) -> Scope:
    """The request that resumes a native stream from its start."""
    path = f"/complete/{stream_id}/events"
    return {**scope, "method": "GET", "path": path, "raw_path": path.encode("ascii"), "query_string": b"after=-1"}


def _replaying(body: bytes, receive: Receive) -> Receive:
    """`receive` after this body, which it does not keep."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay


def _with_header(send: Send, header: tuple[bytes, bytes]) -> Send:
    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], header]}
        await send(message)

    return send_with_header
