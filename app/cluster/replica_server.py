"""Serves one replica's ASGI application to gateways, over TCP connections that they keep."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from app.cluster.messages import (
    ACCEPTED,
    BODY,
    END,
    FRAME_HEADER,
    HEAD,
    REFUSED,
    SECRET_BYTES,
    Address,
    Call,
    Head,
    frame,
)
from app.http.request_log import AccessRecord
from app.http.response_cycle import WRITE_EXTENSION, BodyWriter

_SECRET_SECONDS = 5.0


class ReplicaServer:
    """Owned by the replica's event loop."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app, self._replica = app, replica
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._is_draining = False
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.n_open = 0
        """Requests whose responses have not ended."""

    async def start(self, host: str) -> Address:
        """Listens on a free port of this address."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(self._replica, host, port, self._secret)

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, and waits for open ones so long."""
        self._is_draining = True
        self._server.close()
        try:
            async with asyncio.timeout(seconds):
                await self._is_idle.wait()
        except TimeoutError:
            pass

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_SECRET_SECONDS):
                secret = await reader.readexactly(SECRET_BYTES)
            if hmac.compare_digest(secret, self._secret):
                await self._answer_all(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer_all(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        next_call = asyncio.ensure_future(_read_call(reader))
        try:
            while call := await next_call:
                next_call = asyncio.ensure_future(_read_call(reader))
                if self._is_draining:
                    writer.write(frame(REFUSED))
                else:
                    await self._answer(call, writer, next_call)
        finally:
            next_call.cancel()

    async def _answer(self, call: Call, writer: asyncio.StreamWriter, next_call: asyncio.Task[Call | None]) -> None:
        """Answers a request, or cancels it when the gateway closes the connection. Raises what the application does."""
        self.n_open += 1
        self._is_idle.clear()
        working = asyncio.ensure_future(respond(self._app, call, writer))
        try:
            await asyncio.wait({working, next_call}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() or next_call.result():
                await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            self.n_open -= 1
            if not self.n_open:
                self._is_idle.set()


async def _read_call(reader: asyncio.StreamReader) -> Call | None:
    """The next request; None if the gateway has closed the connection."""
    try:
        _, length = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
        return msgspec.msgpack.decode(await reader.readexactly(length), type=Call)
    except (OSError, asyncio.IncompleteReadError):
        return None


class _FrameWriter(BodyWriter):
    """Writes parts of a body as frames. What a gateway does not read yet waits in memory."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._has_begun = False

    @property
    def is_ready(self) -> bool:
        return self._has_begun and not self._writer.is_closing()

    def prepare(self, body: bytes) -> tuple[Callable[[bytes], object], bytes]:
        return self._writer.write, frame(BODY, body)

    async def send(self, message: Message) -> None:
        """The application's ASGI send()."""
        if message["type"] == "http.response.start":
            head = Head(message["status"], tuple((bytes(name), bytes(value)) for name, value in message["headers"]))
            self._writer.write(frame(HEAD, msgspec.msgpack.encode(head)))
            self._has_begun = True
        elif body := message.get("body"):
            self.write(bytes(body))


async def respond(app: ASGIApp, call: Call, writer: asyncio.StreamWriter) -> None:
    """Writes the application's whole response. A cancellation is a client disconnect."""
    is_body_sent = False

    async def receive() -> Message:
        nonlocal is_body_sent
        if is_body_sent:
            await asyncio.Event().wait()
        is_body_sent = True
        return {"type": "http.request", "body": call.body, "more_body": False}

    writer.write(frame(ACCEPTED))
    frames = _FrameWriter(writer)
    await app(_scope(call, frames), receive, frames.send)
    writer.write(frame(END))


def _scope(call: Call, body_writer: BodyWriter) -> Scope:
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
        "extensions": {WRITE_EXTENSION: body_writer},
    }
    AccessRecord.get_or_create(scope).request_id = call.request_id
    return scope
