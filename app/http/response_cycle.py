"""One request and its response: the ASGI calls of the application, and the framing of the response (RFC 9112, 6).

The service adds an extension to the scope of a request, as the ASGI specification provides for:
`scope["extensions"]["inkstream.response.write"]` is a BodyWriter, with which a stream writes parts of its body in the
call itself, past the middlewares' send(). A middleware that changes bodies, or keeps them, removes it from the scope.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

from starlette.types import Message, Scope

from app.http.flow_control import FlowControl

WRITE_EXTENSION = "inkstream.response.write"
"""Name of the ASGI extension; its value is a BodyWriter."""
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_STATUS_LINES = {code: f"HTTP/1.1 {code} {_REASONS.get(code, '')}\r\n".encode() for code in range(100, 600)}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_INVALID_NAME = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_INVALID_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CLOSE = re.compile(rb"(?:^|,)[ \t]*close[ \t]*(?:,|$)", re.IGNORECASE)


class BodyWriter:
    """Writes parts of a body of unknown length in the call itself."""

    __slots__ = ("_flow", "_transport", "is_open")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport, self._flow = transport, flow
        self.is_open = False
        """Whether the head has been written, and the body has not ended."""

    @property
    def is_ready(self) -> bool:
        """Whether the response has begun and the client has taken, or the system has buffered, all of it so far."""
        return self.is_open and not (self._flow.is_write_paused or self._transport.is_closing())

    def write(self, body: bytes) -> None:
        """Writes a part, which must not be empty; only if `is_ready`."""
        write, data = self.prepare(body)
        write(data)

    def prepare(self, body: bytes) -> tuple[Callable[[bytes], object], bytes]:
        """The call that write() would make, and its data; valid until the caller's event loop callback ends."""
        return self._transport.write, b"%x\r\n%b\r\n" % (len(body), body)


def body_writer(scope: Scope) -> BodyWriter | None:
    """The writer of this request's response; None if a middleware has removed it, or another server calls."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(WRITE_EXTENSION)
    return writer


def remove_writer(scope: Scope) -> None:
    """Makes every part of this request's response pass send()."""
    scope.get("extensions", {}).pop(WRITE_EXTENSION, None)


def begin_head(status: int) -> bytes:
    """The status line and the Date field of a response."""
    return _STATUS_LINES[status] + _date_field(int(time.time()))


@lru_cache(maxsize=1)
def _date_field(second: int) -> bytes:
    return f"date: {formatdate(second, usegmt=True)}\r\n".encode()


class ResponseCycle:
    """Created by HttpProtocol for each request; `receive` and `send` are the application's."""

    __slots__ = (
        *("_flow", "_head", "_is_bodiless", "_is_changed", "_left", "_on_complete", "_transport", "_writer", "body"),
        *("expects_continue", "has_started", "is_complete", "is_disconnected", "is_whole", "keep_alive", "scope"),
    )

    def __init__(
        self,
        scope: Scope,
        transport: asyncio.Transport,
        flow: FlowControl,
        on_complete: Callable[[], None],
        *,
        expects_continue: bool,
    ) -> None:
        self.scope = scope
        self.body = bytearray()
        """What the application has not received yet."""
        self.is_whole = False
        """Whether the end of the body has arrived."""
        self.expects_continue = expects_continue
        """Whether the client waits for 100 Continue before it sends the body (RFC 9110, 10.1.1)."""
        self.keep_alive = True
        self.has_started = self.is_complete = self.is_disconnected = False
        self._transport, self._flow, self._on_complete = transport, flow, on_complete
        self._is_changed = asyncio.Event()
        self._head = b""
        """Head that waits for the first part of the body: both are one write."""
        self._is_bodiless = False
        self._left: int | None = None
        """Bytes of the Content-Length that have not been sent; None if the response has no such field."""
        self._writer = BodyWriter(transport, flow)
        scope["extensions"] = {WRITE_EXTENSION: self._writer}

    def add_body(self, data: bytes) -> None:
        """A part of the request's body has arrived."""
        if not self.is_complete:
            self.body += data
            self._is_changed.set()

    def end_body(self) -> None:
        """The request is complete."""
        self.expects_continue = False
        if not self.is_complete:
            self.is_whole = True
            self._is_changed.set()

    def disconnect(self) -> None:
        """The client has disconnected: receive() says so, and nothing more is written."""
        self.is_disconnected = True
        self.expects_continue = self._writer.is_open = False
        self._is_changed.set()

    async def receive(self) -> Message:
        """The next part of the body, or the client's disconnect."""
        if self.expects_continue and not self._transport.is_closing():
            self.expects_continue = False
            self._transport.write(_CONTINUE)
        if not (self.is_disconnected or self.is_complete):
            self._flow.resume_reading()
            await self._is_changed.wait()
            self._is_changed.clear()
        if self.is_disconnected or self.is_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    async def send(self, message: Message) -> None:
        """Writes a part of the response, once the client has read what came before."""
        if self._flow.is_write_paused and not self.is_disconnected:
            await self._flow.drain()
        if self.is_disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.has_started and not self.is_complete:
            self._send_body(message.get("body", b""), is_last=not message.get("more_body", False))
        elif kind == "http.response.start" and not self.has_started:
            self._send_head(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"unexpected ASGI message {kind!r}")

    def _send_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Chooses the framing of the body, and writes the head, or keeps it for the body if its length is known."""
        fields = [(name.lower(), value) for name, value in headers]
        if _INVALID_NAME.search(b"".join([name for name, _ in fields])):
            raise RuntimeError("invalid name of a response header")
        if _INVALID_VALUE.search(b"".join([value for _, value in fields])):
            raise RuntimeError("invalid value of a response header")
        closes = False
        lines = [begin_head(status)]
        for name, value in fields:
            lines.append(b"%b: %b\r\n" % (name, value))
            if name == b"content-length":
                self._left = int(value)
            elif name == b"connection" and _CLOSE.search(value):
                closes = True
            elif name == b"transfer-encoding":
                raise RuntimeError("the server frames the response, not the application")
        self.keep_alive = self.keep_alive and not closes
        if not (self.keep_alive or closes):
            lines.append(b"connection: close\r\n")
        self._is_bodiless = self.scope["method"] == "HEAD" or status in (204, 304)
        # HTTP/1.0 has no chunks: the end of the connection ends a body of unknown length (RFC 9112, 6.3).
        is_chunked = self._left is None and not self._is_bodiless and self.scope["http_version"] != "1.0"
        lines.append(b"transfer-encoding: chunked\r\n\r\n" if is_chunked else b"\r\n")
        self.has_started, self.expects_continue, self._writer.is_open = True, False, is_chunked
        head = b"".join(lines)
        if self._left is None and not self._is_bodiless:
            self._transport.write(head)  # the first part of a stream may take a while
        else:
            self._head = head

    def _send_body(self, body: bytes, *, is_last: bool) -> None:
        if self._is_bodiless:
            body = b""
        elif self._writer.is_open:
            body = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            if is_last:
                body += b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (is_last and self._left):
                raise RuntimeError(f"the response is {'longer' if self._left < 0 else 'shorter'} than its length")
        if self._head:
            self._transport.writelines((self._head, body) if body else (self._head,))
            self._head = b""
        elif body:
            self._transport.write(body)
        if is_last:
            self._complete()

    def _complete(self) -> None:
        self.is_complete = True
        self._writer.is_open = False
        self._is_changed.set()
        if not self.keep_alive:
            self._transport.close()
        self._on_complete()
