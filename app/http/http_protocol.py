"""One HTTP connection: uvicorn's protocol with deadlines, limits and a strict parser.

One timer, set per request and per stall, covers the head, the body, the time between requests, a client that does not
read, and the response as a whole. A request that breaks a limit or the framing rules gets an error in the common
format, and the connection closes after lingering for a moment, because closing with unread bytes would reset it and
discard the response. A GET on a half-closed connection is answered. With any other method a FIN means that the client
has disconnected, and its work is cancelled.

llhttp ends a request that offers an upgrade (RFC 9110, 7.8) with its headers: httptools reports the end of the message
and raises HttpParserUpgrade with the position of the first byte after the head. The service ignores every offer, so
those bytes are the body of the request. HttpProtocol drops the early end and gives a new parser the same head without
the Upgrade field. The new parser therefore applies the same framing (Content-Length, Transfer-Encoding, Connection),
and reads the body and all requests after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from app.http.auth import is_authenticated
from app.http.best_effort import CONNECTION_SECONDS, REQUEST_SECONDS
from app.http.connection_limits import (
    ConnectionFlowControl,
    ConnectionLimits,
    ConnectionTimeouts,
    ReadBlock,
    ReceivePhase,
    RequestLimits,
)
from app.http.errors import ApiError
from app.http.host_filter import TARGET_HOST_KEY
from app.http.incoming_bodies import SMALL_BODY
from app.http.request_log import RejectConnection, early_response
from app.http.sse import BODY_WRITER, BodyWriter

UVICORN_INTERNALS = {
    "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol": (
        "_start_asgi_task app client connection_lost connection_made cycle data_received eof_received "
        "expect_100_continue flow headers on_body on_header on_headers_complete on_message_begin on_message_complete "
        "on_response_complete on_url parser pause_writing pipeline scope server_state shutdown transport url"
    ),
    "uvicorn.protocols.http.httptools_impl.RequestResponseCycle": (
        "body chunked_encoding disconnected expected_content_length flow keep_alive message_event response_complete "
        "response_started scope send transport waiting_for_100_continue"
    ),
    "uvicorn.protocols.http.flow_control.FlowControl": (
        "_transport pause_reading pause_writing resume_reading resume_writing write_paused"
    ),
    "uvicorn.config.Config": "app backlog get_loop_factory",
    "uvicorn.server.Server": ("capture_signals config lifespan server_state should_exit shutdown started startup"),
    "uvicorn.server.ServerState": "connections default_headers tasks total_requests",
    "httptools.HttpRequestParser": "feed_data get_http_version get_method set_dangerous_leniencies should_upgrade",
}
"""What app/http and app/server.py override, call or read of uvicorn's and httptools' undocumented code, by class.

app/common/event_loop.py uses get_loop_factory(), and app/http also STATUS_LINE.
tests/http/test_uvicorn_internals.py fails where this list is incomplete, or where a release changes a file of it.
"""
_VERSIONS = ("1.1", "1.0")
_UNSUPPORTED_VERSION = "this service supports HTTP/1.0 and HTTP/1.1: send the request in one of them"
_FORBIDDEN_TRAILERS = frozenset((b"connection", b"content-length", b"host", b"transfer-encoding", b"upgrade"))
"""Fields that change how a message is framed or routed (RFC 9110, 6.5.1); llhttp would act on some of them."""
_PIECE_BYTES = 16384
"""Input is parsed in pieces, because RequestLimits does not count what follows the parser's last event in a piece."""
_COSTLY_PIECE_BYTES = 2048
"""Size of the next piece after a costly one, such as many tiny chunks: each chunk is an event."""
_COSTLY_SECONDS = 0.0001
_HEAD_CALLBACKS = ("on_message_begin", "on_url", "on_header", "on_headers_complete")


def check_head(scope: MutableMapping[str, Any], method: bytes, version: str, url: bytes) -> None:
    """Raises ApiError 400 for an unsupported request head; stores the host of an absolute URL in the scope.

    The status is 400 and not 501 or 505, because monitoring counts every 5xx as a fault of the service, and any client
    can send such a head.
    """
    if version not in _VERSIONS:
        raise _bad_request(_UNSUPPORTED_VERSION)
    if method == b"CONNECT":
        raise _bad_request("this service is not a proxy: send the request itself instead of CONNECT")
    codings = [value for name, value in scope["headers"] if name == b"transfer-encoding"]
    if codings and version == "1.0":  # RFC 9112, 6.1: an HTTP/1.0 proxy on the way may frame the message differently
        raise _bad_request("HTTP/1.0 has no Transfer-Encoding: send the body with Content-Length, or as HTTP/1.1")
    if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked"):
        message = "the only supported Transfer-Encoding is chunked: send the body with it, or with Content-Length"
        raise _bad_request(message)
    _check_target(scope, url)


def check_method(method: bytes) -> None:
    """Raises ApiError 400 for the HTTP/2 preface, which llhttp would read to its end before it fails."""
    if method == b"PRI":
        raise _bad_request(_UNSUPPORTED_VERSION)


def check_trailer(name: bytes) -> None:
    """Raises ApiError 400 for a field that must not come after the body."""
    if name.lower() in _FORBIDDEN_TRAILERS:
        raise _bad_request(f"{name.decode('latin-1')} is not allowed in trailers: send it with the headers")


def _check_target(scope: MutableMapping[str, Any], url: bytes) -> None:
    """Accepts the origin form and the absolute form of RFC 9112, 3.2, without a fragment."""
    if b"#" in url:
        raise _bad_request("a request target has no fragment: send the URL up to the #")
    if url.startswith(b"/"):
        return
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        parts = None
    if parts is None or not parts.host or not parts.path:
        raise _bad_request("the request target must be a path like /complete or a URL like http://host/complete")
    scope[TARGET_HOST_KEY] = b"[%b]" % parts.host if b":" in parts.host else parts.host


def _bad_request(message: str) -> ApiError:
    return ApiError(400, message, code="bad_request")


class HttpProtocol(HttpToolsProtocol):
    """uvicorn creates one per connection."""

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
        self._connections = connections
        self._limits = connections.limits
        self._is_within_limits = True
        self._request_limits = RequestLimits(connections.limits)
        self._running: RequestResponseCycle | None = None
        self._is_last, self._response_deadline = False, 0.0
        self._unparsed = b""
        """Input that waits for a turn; the connection is not read meanwhile."""
        self._parse_seconds = 0.0
        """Spent on input since the connection's last response or turn."""
        self._is_trusted = False
        """Whether the last request had an API key; input of other connections waits if there is much of it."""
        self._discarded_bytes = 0
        """Of the rest of a body whose response is complete, and then of what comes while the connection lingers."""
        self._has_old_deadline = False
        """Whether the parser's events ask for another deadline: most packets hold a whole request, which needs one."""

    def connection_made(self, transport: Any) -> None:
        """Registers the connection and sets the deadline for the first request's head."""
        super().connection_made(transport)
        self.flow = ConnectionFlowControl(transport, self._limits.write_seconds)
        self._timeouts = ConnectionTimeouts(self.flow, self._on_input_timeout, self._cut)
        self._is_within_limits = self._connections.register(transport, self._address)
        if not self._is_within_limits:
            self.app = RejectConnection(self.app, self._connections.requests)
        self._timeouts.set_deadline(
            self._limits.head_seconds if self._is_within_limits else self._limits.reserve_seconds
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Notifies the application and stops all timers."""
        super().connection_lost(exc)
        best_effort = self._connections.best_effort
        best_effort.cancel(self._address, self._on_turn)
        if not (self._is_trusted or (self._running and is_authenticated(self._running.scope))):
            best_effort.charge(CONNECTION_SECONDS)
        if self._is_busy:  # uvicorn notifies only the request that was parsed last, which may be queued behind this one
            self._running.disconnected = True  # type: ignore[union-attr]
            self._running.message_event.set()  # type: ignore[union-attr]
        self._timeouts.cancel()
        self._connections.unregister(self.transport)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client closed its sending side; True keeps this side open, for GET and HEAD only."""
        are_reads = [cycle.scope["method"] in ("GET", "HEAD") for cycle in (self._running, self.cycle) if cycle]
        if self._request_limits.phase is not ReceivePhase.DONE or not self._is_busy or not all(are_reads):
            return False
        self.cycle.keep_alive = False
        return True

    def data_received(self, data: bytes) -> None:
        """Parses `data` within the limits, or what is left of it in later turns."""
        if self._request_limits.phase is ReceivePhase.LINGER:
            self._discard(len(data))
        elif self._unparsed:
            self._unparsed += data
        elif self._must_wait(data):
            self._wait_for_turn(data)
        else:
            self._parse_input(data)

    def _parse_input(self, data: bytes) -> None:
        self._begin_request()
        try:
            self._parse_pieces(data)
            self._update_old_deadline()
            if self._request_limits.phase is ReceivePhase.HEAD and not self._is_busy:
                self._connections.mark_idle(self.transport, ReceivePhase.HEAD)
        except httptools.HttpParserError as error:
            cause = error.__context__  # an error that a callback of this class raised in the parser
            self._reject(
                cause if isinstance(cause, ApiError) else ApiError(400, "invalid HTTP/1.1", code="bad_request")
            )
        except ApiError as error:
            self._reject(error)

    def _parse_pieces(self, data: bytes) -> None:
        position, size, started = 0, _PIECE_BYTES, time.perf_counter()
        while position < len(data):
            if self._parse_seconds > self._limits.parse_seconds:
                self._wait_for_turn(data[position:])
                return
            piece = data[position : position + size]
            position += len(piece)
            self._request_limits.before_parsing(len(piece))
            self._parse(piece)
            self._request_limits.after_parsing()
            if self._is_receiving_body and self.cycle.response_complete:
                self._discard(len(piece))
                if self._request_limits.phase is ReceivePhase.LINGER:
                    return
            now = time.perf_counter()
            is_costly = now - started >= _COSTLY_SECONDS
            if is_costly or len(piece) < _COSTLY_PIECE_BYTES:  # not the plain pieces of a long body
                self._parse_seconds += now - started
            size, started = _COSTLY_PIECE_BYTES if is_costly else _PIECE_BYTES, now

    def _must_wait(self, data: bytes) -> bool:
        if self._is_trusted or self._request_limits.phase is ReceivePhase.BODY:
            return False
        return self._connections.best_effort.is_exhausted and not self._connections.has_known_key(data)

    def _wait_for_turn(self, data: bytes) -> None:
        best_effort = self._connections.best_effort
        best_effort.charge(self._parse_seconds)
        if not best_effort.has_memory(self._address, len(data)):
            self._cut("full")
            return
        self._unparsed = data
        if not self._is_busy:  # evicted after connections that have sent nothing
            self._connections.mark_idle(self.transport, ReceivePhase.HEAD)
        self.flow.block_reading(ReadBlock.TURN)
        best_effort.request(self._address, self._on_turn, size=len(data))

    def _on_turn(self) -> None:
        data, self._unparsed, self._parse_seconds = self._unparsed, b"", 0.0
        if self.transport.is_closing() or self._request_limits.phase is ReceivePhase.LINGER:
            return
        self._parse_input(data)
        if not self._unparsed:
            self.flow.unblock_reading(ReadBlock.TURN)
            if self._has_unread_body:
                self.flow.pause_reading()

    def _discard(self, size: int) -> None:
        """Counts input that nothing will use, and closes the connection if there is too much of it."""
        self._discarded_bytes += size
        if self._discarded_bytes <= self._limits.discarded_bytes:
            return
        if self._request_limits.phase is ReceivePhase.LINGER:
            self.abort()
        else:
            self._linger()

    def pause_writing(self) -> None:
        """The socket buffer is full: sets the deadline for the client's next read."""
        super().pause_writing()
        self._timeouts.schedule()

    def on_message_begin(self) -> None:
        """Start of a request, which may be pipelined in the same packet as the previous one."""
        super().on_message_begin()
        self._discarded_bytes = 0
        self._begin_request()
        self._request_limits.begin_headers()

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        super().on_url(url)
        self._request_limits.record_url(len(self.url))
        check_method(self.parser.get_method())

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or a trailer field: the limits include trailers, and the application never sees them."""
        value = value.rstrip(b" \t")  # llhttp keeps the whitespace after the value (RFC 9110, 5.5)
        self._request_limits.record_header(len(name) + len(value) + 4)
        if self._request_limits.phase is ReceivePhase.HEAD:
            super().on_header(name, value)
        else:
            check_trailer(name)

    def on_headers_complete(self) -> None:
        """Passes the request to the application, which may have to await the body."""
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise ApiError(400, "too many pipelined requests: wait for responses", code="pipelined")
        version = self.parser.get_http_version()
        check_head(cast(Scope, self.scope), self.parser.get_method(), version, self.url)
        self.expect_100_continue &= version != "1.0"  # RFC 9110, 10.1.1: HTTP/1.0 has no interim responses
        super().on_headers_complete()
        self.flow.resume_reading()  # uvicorn stops reading at a second request, and would miss the client's disconnect
        self._connections.mark_active(self.transport)
        self._request_limits.phase = ReceivePhase.BODY
        self._is_last = not self.cycle.keep_alive or self._connections.is_draining or not self._is_within_limits
        self.cycle.keep_alive = True  # for now: a response before the end of the body must not close at once
        self._has_old_deadline = True

    def on_body(self, body: bytes) -> None:
        """A chunk of body data; stops reading if the request is queued, to bound its buffer."""
        super().on_body(body)
        self._request_limits.record_body()
        if self._has_unread_body:
            self.flow.pause_reading()  # until the application asks for more; uvicorn's own limit is 64 KiB
            if self.cycle is not self._running:
                self.flow.block_reading(ReadBlock.QUEUE)

    def on_message_complete(self) -> None:
        """The request is complete, or its head if it offers an upgrade."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self.cycle.waiting_for_100_continue = False
        self._request_limits.phase = ReceivePhase.DONE
        self.cycle.keep_alive = not self._is_last
        self._has_old_deadline = True

    def on_response_complete(self) -> None:
        """Starts the next queued request, if there is one."""
        self.server_state.total_requests += 1
        assert self._running
        self._running.body.clear()  # what the application did not read
        self._parse_seconds = 0.0
        self._is_trusted = is_authenticated(self._running.scope)
        cast(dict[str, Any], self._running.scope).pop(BODY_WRITER, None)  # it was a reference cycle
        if self.transport.is_closing() or self._request_limits.phase is ReceivePhase.LINGER:
            return
        if self._is_receiving_body and self._is_last:
            self._linger()
            return
        self.flow.unblock_reading(ReadBlock.QUEUE)
        if self._is_receiving_body:
            # The response kept the connection, so the rest of the body has as much time as any body. Meanwhile the
            # connection may be evicted, like one that lingers.
            self._connections.mark_idle(self.transport, ReceivePhase.LINGER)
            return
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        self._update_deadline()

    def shutdown(self) -> None:
        """Server shutdown: closes an idle connection now, a busy or new one after its response."""
        if self._is_busy:
            self.cycle.keep_alive = False
        elif self._request_limits.phase is ReceivePhase.DONE and not self._unparsed:
            self.transport.close()

    def abort(self) -> None:
        """Closes the connection at once and cancels its work."""
        self._timeouts.cancel()
        self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cast(dict[str, Any], cycle.scope)[BODY_WRITER] = BodyWriter(cycle)
        self._response_deadline = time.monotonic() + self._limits.response_seconds
        if cycle.scope["http_version"] == "1.0":
            app = self._without_chunks(cycle, app)
        super()._start_asgi_task(cycle, app)

    @staticmethod
    def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
        """HTTP/1.0 has no chunks, which uvicorn sends nevertheless: the end of the connection ends such a body.

        RFC 9112, 6.1 and 6.3. uvicorn counts each part of the body against `expected_content_length`.
        """

        is_unframed = False

        async def send(message: Any) -> None:
            nonlocal is_unframed
            if message["type"] == "http.response.start":
                is_unframed = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if is_unframed:
                    cycle.chunked_encoding = False
            elif is_unframed:
                cycle.expected_content_length = len(message["body"])
            await cycle.send(message)

        return lambda scope, receive, _send: app(scope, receive, send)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    @property
    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _has_unread_body(self) -> bool:
        """Whether the application has not read the body that is being received, so that more must wait."""
        return self.cycle is not None and len(self.cycle.body) > SMALL_BODY and not self.cycle.response_complete

    @property
    def _is_receiving_body(self) -> bool:
        """Whether the body that is being received belongs to the request that is running."""
        return self._request_limits.phase is ReceivePhase.BODY and self.cycle is self._running

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                self._decline_offer()
                data = data[offer.args[0] :]

    def _decline_offer(self) -> None:
        """Continues with a parser that has seen the same head without the offer of an upgrade."""
        is_repeating = True

        def unless_repeating(callback: Callable[..., None]) -> Callable[..., None]:
            return lambda *args: None if is_repeating else callback(*args)

        callbacks = {name: unless_repeating(getattr(self, name)) for name in _HEAD_CALLBACKS}
        events = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete, **callbacks)
        request_line = b"%b / HTTP/%b\r\n" % (self.parser.get_method(), self.parser.get_http_version().encode())
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(events)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(b"".join([request_line, *fields, b"\r\n"]))
        is_repeating = False

    def _begin_request(self) -> None:
        """Called at the first byte of a request, and again once the parser has seen it."""
        phase = self._request_limits.phase
        if phase in (ReceivePhase.NEW, ReceivePhase.DONE):
            self._request_limits.phase = ReceivePhase.HEAD
        if phase is ReceivePhase.DONE:  # the deadline of the first request counts from the connection's start
            self._has_old_deadline = True

    def _update_old_deadline(self) -> None:
        if self._has_old_deadline:
            self._has_old_deadline = False
            self._update_deadline()

    def _update_deadline(self) -> None:
        """Sets the deadline for the client's next input, if any is expected."""
        if self._is_receiving_body:
            self._timeouts.set_deadline(self._limits.body_seconds)
        elif self._is_busy:
            self._timeouts.set_deadline(max(0.0, self._response_deadline - time.monotonic()))
        elif (phase := self._request_limits.phase) in (ReceivePhase.HEAD, ReceivePhase.DONE):
            self._connections.mark_idle(self.transport, phase)
            is_head = phase is ReceivePhase.HEAD
            self._timeouts.set_deadline(self._limits.head_seconds if is_head else self._limits.idle_seconds)

    def _cut(self, reason: str = "write_stalled") -> None:
        self._connections.cut_by_reason[reason] += 1
        self.flow.discard_unsent()
        self.abort()

    def _on_input_timeout(self) -> None:
        phase = self._request_limits.phase
        if phase is ReceivePhase.LINGER:
            self.transport.abort()
        elif self._is_busy and not self._is_receiving_body:
            self._cut("answer_timeout")
        elif self._unparsed and phase is not ReceivePhase.HEAD:
            self._timeouts.set_deadline(self._limits.head_seconds)  # the wait for a turn is not the client's
        elif phase in (ReceivePhase.NEW, ReceivePhase.DONE):
            self.transport.close()  # the client has not sent a request, or none after the last one
        else:
            part = "headers" if phase is ReceivePhase.HEAD else "body"
            self._reject(ApiError(408, f"the {part} did not arrive in time", code=f"{phase.name.lower()}_timeout"))

    def _reject(self, error: ApiError) -> None:
        """Responds to the request that is being received with an error, unless a response is in progress; closes."""
        assert error.code
        self._update_old_deadline()  # a request that came before this one in the same packet may still be answered
        self._connections.cut_by_reason[error.code] += 1
        if self.transport.is_closing():
            return
        if self._is_receiving_body and self.cycle.response_complete:
            self._linger()
        elif self._is_receiving_body and self.cycle.response_started:
            self.transport.close()
        elif self._is_busy and not self._is_receiving_body:
            # Earlier requests are still being answered: the running one may finish, queued ones are dropped.
            self.pipeline.clear()
            self._running.keep_alive = False  # type: ignore[union-attr]
            self.flow.block_reading(ReadBlock.QUEUE)
            self._request_limits.phase = ReceivePhase.LINGER
        else:
            self._send_error(error)

    def _send_error(self, error: ApiError) -> None:
        scope = cast(Scope, self.cycle.scope) if self._is_busy else None
        headers, counts = self.server_state.default_headers, self._connections.requests
        self._connections.best_effort.charge(REQUEST_SECONDS)
        self.transport.write(early_response(error, scope, headers, counts))
        if self._is_busy:  # the application sees a disconnect, and its next receive() writes no 100 Continue
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
        self._linger()

    def _linger(self) -> None:
        """Discards input for a moment, then closes the connection."""
        self._request_limits.phase = ReceivePhase.LINGER
        self._discarded_bytes, self._unparsed = 0, b""
        self._connections.mark_idle(self.transport, ReceivePhase.LINGER)
        self.flow.unblock_reading(*ReadBlock)
        self.transport.write_eof()
        self._timeouts.set_deadline(self._limits.linger_seconds)
