"""One HTTP connection: uvicorn's protocol with deadlines, limits and a strict parser.

One timer, set per request and per stall, covers the head, the body, the time between requests, a client that does not
read, and the response as a whole. A request that breaks a limit or the framing rules gets an error in the common
format, and the connection closes after lingering for a moment, because closing with unread bytes would reset it and
discard the response. A GET on a half-closed connection is answered. With any other method a FIN means that the client
has disconnected, and its work is cancelled.

RequestParser is llhttp (httptools) without protocol switches, with checks of headers beyond the parser's.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any, Protocol, cast

import httptools
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.http import early_errors, http_protocol
from app.http.connection_limits import ConnectionLimits, WaitReason
from app.http.errors import ApiError
from app.http.flow_control import ConnectionFlowControl, ConnectionTimeouts, ReceivePhase, RequestLimits
from app.http.host_filter import TARGET

_VERSIONS = ("1.1", "1.0")
_SPOKEN = "this service speaks HTTP/1.0 and HTTP/1.1: send the request as one"
_NOT_IN_TRAILERS = frozenset((b"connection", b"content-length", b"host", b"transfer-encoding", b"upgrade"))
"""Fields that change how a message is framed or routed (RFC 9110, 6.5.1); llhttp would act on some of them."""


def check(scope: MutableMapping[str, Any], method: bytes, version: str, url: bytes) -> None:
    """Raises ApiError 400 for a head that the service does not accept; puts the host of an absolute URL in the scope.

    The status is 400 and not 501 or 505: operators count a 5xx as a fault of the service, and any client can send such
    a head.
    """
    if version not in _VERSIONS:
        raise _refused(_SPOKEN)
    if method == b"CONNECT":
        raise _refused("this service is not a proxy: send the request itself instead of CONNECT")
    codings = [value for name, value in scope["headers"] if name == b"transfer-encoding"]
    if codings and version == "1.0":  # RFC 9112, 6.1: an HTTP/1.0 proxy on the way may frame the message differently
        raise _refused("HTTP/1.0 has no Transfer-Encoding: send the body with Content-Length, or as HTTP/1.1")
    if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
        message = "the only Transfer-Encoding here is chunked: send the body without any other, or with Content-Length"
        raise _refused(message)
    _check_target(scope, url)


def check_method(method: bytes) -> None:
    """Raises ApiError 400 for the HTTP/2 preface, which llhttp would read to its end before it fails."""
    if method == b"PRI":
        raise _refused(_SPOKEN)


def check_trailer(name: bytes) -> None:
    """Raises ApiError 400 for a field that must not come after the body."""
    if name.lower() in _NOT_IN_TRAILERS:
        raise _refused(f"{name.decode('latin-1')} is not allowed in trailers: send it with the headers")


def _check_target(scope: MutableMapping[str, Any], url: bytes) -> None:
    """Accepts the origin form and the absolute form of RFC 9112, 3.2, without a fragment."""
    if b"#" in url:
        raise _refused("a request target has no fragment: send the URL up to the #")
    if url.startswith(b"/"):
        return
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        parts = None
    if parts is None or not parts.host or not parts.path:
        raise _refused("the request target must be a path like /complete or a URL like http://host/complete")
    scope[TARGET] = b"[%b]" % parts.host if b":" in parts.host else parts.host


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="bad_request")


class _Events(Protocol):
    """The parser's callbacks, in this order for each request; any of them may raise to stop the parser."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser:
    """Drop-in for httptools.HttpRequestParser that ignores every offer to upgrade (RFC 9110, 7.8).

    llhttp ends a request that offers an upgrade with its headers: httptools reports the end of the message and raises
    HttpParserUpgrade with the position of the first byte behind the head. Those bytes are the body of the request. This
    class drops the early end and gives a new llhttp parser the same head without the Upgrade field. The new parser
    therefore applies the same framing (Content-Length, Transfer-Encoding, Connection), and reads the body and all
    requests after it. The events of the repeated head are dropped, as the first parser has sent them.
    """

    def __init__(self, events: _Events) -> None:
        self._events = events
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_repeating_head = False
        self.on_body = events.on_body
        self._parser = self._new_parser()

    def feed_data(self, data: bytes) -> None:
        """Parses the next bytes of the connection, however they are split. Raises httptools.HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                self._repeat_head()
                data = data[offer.args[0] :]

    def close(self) -> None:
        """Releases the parser, which refers to this object and through it to the connection."""
        del self._parser, self._events, self.on_body

    def get_method(self) -> bytes:
        """Method of the current request."""
        return self._parser.get_method()

    def get_http_version(self) -> str:
        """Version of the current request, as "1.1"."""
        return self._parser.get_http_version()

    def should_keep_alive(self) -> bool:
        """Whether another request may follow the current one."""
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Never: the connection keeps speaking HTTP/1.1."""
        return False

    def on_message_begin(self) -> None:
        """llhttp: first byte of a request."""
        if not self._is_repeating_head:
            self._headers.clear()
            self._events.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """llhttp: part of the request target."""
        if not self._is_repeating_head:
            self._events.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """llhttp: a header or trailer field. llhttp leaves the whitespace behind the value (RFC 9110, 5.5) on it."""
        if not self._is_repeating_head:
            value = value.rstrip(b" \t")
            self._headers.append((name, value))
            self._events.on_header(name, value)

    def on_headers_complete(self) -> None:
        """llhttp: end of the head."""
        if not self._is_repeating_head:
            self._events.on_headers_complete()

    def on_message_complete(self) -> None:
        """llhttp: end of the request, or of its head where it offers an upgrade."""
        if not self._parser.should_upgrade():
            self._events.on_message_complete()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Bytes after the last request of a connection are dropped: an error would cost that request its answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _repeat_head(self) -> None:
        """Continues with a parser that has seen the same head without the offer."""
        request_line = b"%b / HTTP/%b\r\n" % (self.get_method(), self.get_http_version().encode())
        fields = [b"%b: %b\r\n" % field for field in self._headers if field[0].lower() != b"upgrade"]
        self._parser = self._new_parser()
        self._is_repeating_head = True
        try:
            self._parser.feed_data(b"".join([request_line, *fields, b"\r\n"]))
        finally:
            self._is_repeating_head = False


class HttpProtocol(HttpToolsProtocol):
    """uvicorn creates one per connection; an EvictableConnection of ConnectionLimits."""

    flow: ConnectionFlowControl

    def __init__(
        self,
        connections: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: Any,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self.address = ""
        self._connections = connections
        self._limits = connections.limits
        self._is_guest = True
        self._intake = RequestLimits(connections.limits)
        self._running: RequestResponseCycle | None = None
        self._is_last, self._answer_due = False, 0.0

    def connection_made(self, transport: Any) -> None:
        """Registers the connection and sets the deadline for the first request's head."""
        super().connection_made(transport)
        self.flow = ConnectionFlowControl(transport, self._limits.write_seconds)
        self._watch = ConnectionTimeouts(self.flow, self._on_late_client, self._on_stalled_client)
        self.address = self.client[0] if self.client else ""
        self._is_guest = self._connections.enter(self)
        if not self._is_guest:
            self.app = early_errors.RejectConnection(self.app)
        self._watch.expect(self._limits.head_seconds if self._is_guest else self._limits.reserve_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies the application and stops all timers."""
        self.parser.close()  # type: ignore[attr-defined]
        super().connection_lost(exc)
        if self._is_busy:  # uvicorn notifies only the request that was parsed last, which may be queued behind this one
            self._running.disconnected = True  # type: ignore[union-attr]
            self._running.message_event.set()  # type: ignore[union-attr]
        self._watch.end()
        self._connections.leave(self)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client closed its sending side; True keeps ours open, after GET and HEAD only."""
        asked = [cycle.scope["method"] in ("GET", "HEAD") for cycle in (self._running, self.cycle) if cycle]
        if self._intake.phase is not ReceivePhase.DONE or not self._is_busy or not all(asked):
            return False
        self.cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        """Parses `data` within the limits."""
        if self._intake.phase is ReceivePhase.LINGER:
            return
        if self._intake.phase is ReceivePhase.DONE:
            self._begin_head()
        try:
            self._intake.before(len(data))
            self.parser.feed_data(data)
            self._intake.after(len(data))
            if self._intake.phase is ReceivePhase.HEAD and not self._is_busy:
                self._connections.rest(self, WaitReason.HEAD)
        except httptools.HttpParserError as error:
            ours = error.__context__  # an error that one of our own callbacks raised in the parser
            self._refuse(ours if isinstance(ours, ApiError) else ApiError(400, "invalid HTTP/1.1", code="bad_request"))
        except ApiError as error:
            self._refuse(error)

    def pause_writing(self) -> None:
        """The socket buffer is full: sets the deadline for the client's next read."""
        super().pause_writing()
        self._watch.look_later()

    def on_message_begin(self) -> None:
        """Start of a request, which may be pipelined in the same packet as the previous one."""
        super().on_message_begin()
        if self._intake.phase is ReceivePhase.DONE:
            self._begin_head()
        self._intake.begin_headers()

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        super().on_url(url)
        self._intake.url(len(self.url))
        http_protocol.check_method(self.parser.get_method())

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or a trailer field: the limits include trailers, and the application never sees them."""
        self._intake.header(len(name) + len(value) + 4)
        if self._intake.phase is ReceivePhase.HEAD:
            super().on_header(name, value)
        else:
            http_protocol.check_trailer(name)

    def on_headers_complete(self) -> None:
        """Passes the request to the application, which may have to wait for the body."""
        if len(self.pipeline) >= self._limits.pipelined:
            raise ApiError(400, "too many requests wait on this connection", code="pipelined")
        version = self.parser.get_http_version()
        http_protocol.check(cast(Scope, self.scope), self.parser.get_method(), version, self.url)
        self.expect_100_continue &= version != "1.0"  # RFC 9110, 10.1.1: HTTP/1.0 has no interim responses
        super().on_headers_complete()
        self.flow.resume_reading()  # uvicorn stops reading at a second request, and would miss the client's disconnect
        self._connections.wake(self)
        self._intake.begin_body()
        self._is_last = not self.cycle.keep_alive or self._connections.is_draining or not self._is_guest
        self.cycle.keep_alive = True  # for now: a response before the end of the body must not close at once
        self._wait_for_client()

    def on_body(self, body: bytes) -> None:
        """A chunk of body data; stops reading if the request is queued, to bound its buffer."""
        super().on_body(body)
        self._intake.body()
        if self.cycle is not self._running and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.hold()

    def on_message_complete(self) -> None:
        """The request is complete."""
        super().on_message_complete()
        self.cycle.waiting_for_100_continue = False
        self._intake.phase = ReceivePhase.DONE
        self.cycle.keep_alive = not self._is_last
        self._wait_for_client()

    def on_response_complete(self) -> None:
        """Starts the next queued request, if there is one."""
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._intake.phase is ReceivePhase.LINGER:
            return
        if self._reads_on and self._is_last:
            self._linger()
            return
        self.flow.release()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._wait_for_client()

    def shutdown(self) -> None:
        """Server shutdown: closes an idle connection now, and a busy one after its response."""
        if self._is_busy:
            self.cycle.keep_alive = False
        elif self._intake.phase is ReceivePhase.DONE:
            self.transport.close()

    def send_off(self) -> None:
        """Closes the connection at once and cancels its work."""
        self._watch.end()
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        self._answer_due = time.monotonic() + self._limits.answer_seconds
        super()._start_asgi_task(cycle, app)

    @property
    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _reads_on(self) -> bool:
        """Whether the body that is being received belongs to the request that is running."""
        return self._intake.phase is ReceivePhase.BODY and self.cycle is self._running

    def _begin_head(self) -> None:
        self._intake.begin_head()
        self._wait_for_client()

    def _wait_for_client(self) -> None:
        """Sets the deadline for the client's next input, if any is expected."""
        if self._reads_on:
            # Answered already: the rest of the body is useless, but closing now could discard the response.
            is_over = self.cycle.response_complete
            self._watch.expect(self._limits.linger_seconds if is_over else self._limits.body_seconds)
        elif self._is_busy:
            self._watch.expect(max(0.0, self._answer_due - time.monotonic()))
        elif self._intake.phase is ReceivePhase.HEAD:
            self._connections.rest(self, WaitReason.HEAD)
            self._watch.expect(self._limits.head_seconds)
        elif self._intake.phase is ReceivePhase.DONE:
            self._connections.rest(self, WaitReason.NEXT)
            self._watch.expect(self._limits.idle_seconds)

    def _on_stalled_client(self, reason: str = "write_stalled") -> None:
        self._connections.cut[reason] += 1
        self.flow.forget_unsent()
        self.send_off()

    def _on_late_client(self) -> None:
        phase = self._intake.phase
        if phase is ReceivePhase.LINGER:
            self.transport.abort()
        elif self._is_busy and not self._reads_on:
            self._on_stalled_client("answer_timeout")
        elif phase is ReceivePhase.DONE or (phase is ReceivePhase.HEAD and not self._intake.head_bytes):
            self.transport.close()  # it has not sent a request
        else:
            part = "headers" if phase is ReceivePhase.HEAD else "body"
            self._refuse(ApiError(408, f"the {part} did not arrive in time", code=f"{phase.name.lower()}_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answers the request that is being received with an error, unless a response is in progress, and closes."""
        assert error.code
        self._connections.cut[error.code] += 1
        if self.transport.is_closing() or (self._reads_on and self.cycle.response_started):
            self.transport.close()
        elif self._is_busy and not self._reads_on:
            # Earlier requests are still being answered: the running one may finish, queued ones are dropped.
            self.pipeline.clear()
            self._running.keep_alive = False  # type: ignore[union-attr]
            self.flow.hold()
            self._intake.phase = ReceivePhase.LINGER
        else:
            self._answer(error)

    def _answer(self, error: ApiError) -> None:
        scope = cast(Scope, self.cycle.scope) if self._is_busy else None
        self.transport.write(early_errors.as_bytes(error, scope, self.server_state.default_headers))
        if self._is_busy:  # the application sees a disconnect, and its next receive() writes no 100 Continue
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self._linger()

    def _linger(self) -> None:
        """Closes the connection after reading on for a moment."""
        self._intake.phase = ReceivePhase.LINGER
        self._connections.rest(self, WaitReason.CLOSE)
        self.flow.release()
        self.transport.write_eof()
        self._watch.expect(self._limits.linger_seconds)
