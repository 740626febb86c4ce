"""Idempotency-Key: a POST that a client or proxy sends again gets the first one's response, or 409 while that runs.

The header follows draft-ietf-httpapi-idempotency-key-header. A key belongs to one owner, path and body. The service
keeps a successful response for a while after its end; every other request is forgotten when it ends, also because its
client has disconnected, and may be sent again.

What is repeated costs no tokens, but it is a request: `Quotas` counts it. An owner with many responses evicts its own.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Protocol

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.access.owner_shares import OwnerShares
from app.common.errors import EngineError
from app.http.auth import owner_of
from app.http.errors import ApiError, from_engine
from app.http.incoming_bodies import IncomingBodies
from app.http.request_body import body_read_before
from app.http.request_log import record_of, respond
from app.http.response_cycle import remove_writer

_MAX_KEY_LENGTH = 255
_MAX_FINISHED = 256
_RETRY_AFTER_SECONDS = "1"
_PART_BYTES = 64 << 10
_Name = tuple[str, str, bytes]
"""Owner, path, and value of the header."""


class Quotas(Protocol):
    """Counts the requests that the middleware answers itself."""

    def check(self, request: Request) -> None:
        """Requires that there is a request left, before the body is read. Raises RateLimitExceeded."""

    def repeated(self, request: Request) -> AbstractContextManager[object]:
        """Counts a request that gets a response again, and is concurrent in the block. Raises RateLimitExceeded."""

    def refused(self, request: Request) -> None:
        """Counts a request that gets an error."""


class IdempotencyMiddleware:
    """ASGI middleware, inside authentication.

    Args:
        bodies: memory for bodies that are arriving.
        max_body_bytes: longer bodies get 413.
        replay_bytes: longer responses are not kept.
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
        self._responses: dict[_Name, _Response] = {}
        """Of requests that run, and of those that have finished."""
        self._timers: dict[_Name, asyncio.TimerHandle] = {}
        """Of finished responses."""
        self._shares = OwnerShares[_Name](_MAX_FINISHED)

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
        async with AsyncExitStack() as stack:
            try:
                self._quotas.check(request)
                reading = body_read_before(scope, receive, self._max_body_bytes, self._bodies)
                body = await stack.enter_async_context(reading)
                name, digest = (owner_of(request), scope["path"], values[0]), hashlib.sha256(body).digest()
                known = self._responses.get(name)
                if known:
                    await stack.aclose()  # the body is known
                    self._check(known, digest, request)
                    stack.enter_context(self._quotas.repeated(request))
            except (ApiError, EngineError) as error:
                refusal = respond(request, error if isinstance(error, ApiError) else from_engine(error))
                await refusal(scope, receive, send)
                return
            if known:
                record_of(request).outcome = "replayed"
                for part in known.messages():
                    await send(part)
                return
            content = bytes(body)
            body.clear()
            await self._answer(name, _Response(digest, self._replay_bytes), scope, _replaying(content, receive), send)

    def _check(self, known: _Response, digest: bytes, request: Request) -> None:
        """Raises ApiError if there is no response for this body, or none yet."""
        if known.digest == digest and known.is_complete:
            return
        self._quotas.refused(request)
        if known.digest != digest:
            message = "this Idempotency-Key belongs to a request with another body: send each request with a new key"
            raise ApiError(400, message, param="Idempotency-Key", code="idempotency_key_reused")
        message = "the request with this Idempotency-Key is still running: send it again in a moment"
        raise ApiError(
            409,
            message,
            param="Idempotency-Key",
            code="idempotency_key_in_use",
            headers={"Retry-After": _RETRY_AFTER_SECONDS},
        )

    async def _answer(self, name: _Name, response: _Response, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the application, and keeps its response if that is complete."""

        async def send_and_keep(message: Message) -> None:
            response.add(message)
            await send(message)

        self._responses[name] = response
        remove_writer(scope)
        try:
            await self._app(scope, receive, send_and_keep)
        finally:
            if response.is_complete and self._seconds:
                self._timers[name] = asyncio.get_running_loop().call_later(self._seconds, self._forget, name)
                self._shares.add(name[0], name)
                if self._shares.is_exceeded:
                    self._forget(next(iter(self._shares.largest)))
            else:
                del self._responses[name]

    def _forget(self, name: _Name) -> None:
        del self._responses[name]
        self._timers.pop(name).cancel()
        self._shares.discard(name[0], name)


class _Response:
    """The response to a request; keeps up to `max_bytes` of it."""

    def __init__(self, digest: bytes, max_bytes: int) -> None:
        self.digest = digest
        """Of the request's body."""
        self.is_complete = False
        """Whether the whole response is kept, and is one that a retry would not change."""
        self._max_bytes = max_bytes
        self._start: Message | None = None
        self._body = bytearray()

    def add(self, message: Message) -> None:
        """Keeps a part of the response, or drops what is kept if it is an error or too long."""
        if message["type"] == "http.response.start":
            self._start = message if message["status"] < 300 else None
        elif self._start:
            self._body += message.get("body", b"")
            if len(self._body) > self._max_bytes:
                self._start, self._body = None, bytearray()
            else:
                self.is_complete = not message.get("more_body", False)

    def messages(self) -> Iterator[Message]:
        """The ASGI messages of a complete response, with a header that says that it is repeated."""
        assert self._start
        yield {**self._start, "headers": [*self._start["headers"], (b"idempotent-replayed", b"true")]}
        for start in range(0, len(self._body), _PART_BYTES):
            part = bytes(self._body[start : start + _PART_BYTES])
            yield {"type": "http.response.body", "body": part, "more_body": True}
        yield {"type": "http.response.body", "body": b""}


def _replaying(body: bytes, receive: Receive) -> Receive:
    """`receive` after this body, which it does not keep."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
