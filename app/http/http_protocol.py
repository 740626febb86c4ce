"""One HTTP connection: parses its requests with llhttp and answers them in order, with limits and deadlines.

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

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Scope
from uvicorn import Config
from uvicorn.server import ServerState

from app.http.auth import is_authenticated
from app.http.best_effort import CONNECTION_SECONDS, REQUEST_SECONDS
from app.http.connection_limits import ConnectionLimits, ReceivePhase
from app.http.errors import ApiError
from app.http.flow_control import ConnectionTimeouts, FlowControl, ReadBlock
from app.http.host_filter import TARGET_HOST_KEY
from app.http.incoming_bodies import SMALL_BODY
from app.http.request_checks import RequestChecks
from app.http.request_log import RejectConnection, early_response
from app.http.response_cycle import ResponseCycle

_PIECE_BYTES = 16384
"""Input is parsed in pieces, because RequestChecks does not count what follows the parser's last event in a piece."""
_COSTLY_PIECE_BYTES = 2048
"""Size of the next piece after a costly one, such as many tiny chunks: each chunk is an event."""
_COSTLY_SECONDS = 0.0001
_HEAD_CALLBACKS = ("on_message_begin", "on_url", "on_header", "on_headers_complete")
_log = logging.getLogger("inkstream")


class HttpProtocol(asyncio.Protocol):
    """Created for each connection, by app/http/acceptor.py or by a server with `http=partial(HttpProtocol, limits)`.

    The parameters after `connections` are those that uvicorn passes to the class in its setting `http`.
    """

    transport: asyncio.Transport
    flow: FlowControl
    parser: httptools.HttpRequestParser

    def __init__(
        self,
        connections: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._app: ASGIApp = config.loaded_app
        self._server_state, self._app_state = server_state, app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._connections, self._limits = connections, connections.limits
        self._is_within_limits = True
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None
        self._address = ""
        self._set_parser(self)
        self._checks = RequestChecks(self._limits)
        self._phase = ReceivePhase.NEW
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()
        self._expects_continue = False
        self._receiving: ResponseCycle | None = None
        """The request that was parsed last, whose body may still arrive."""
        self._running: ResponseCycle | None = None
        """The request that the application answers, or answered last."""
        self._queue = deque[ResponseCycle]()
        """Pipelined requests between these two."""
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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Registers the connection and sets the deadline for the first request's head."""
        self.transport = transport
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # it lists uvicorn's own classes
        self._client, self._server = _address(transport, "peername"), _address(transport, "sockname")
        self._address = self._client[0] if self._client else ""
        self.flow = FlowControl(transport, self._limits.write_seconds)
        self._timeouts = ConnectionTimeouts(self.flow, self._on_input_timeout, self._cut)
        self._is_within_limits = self._connections.register(transport, self._address)
        if not self._is_within_limits:
            self._app = RejectConnection(self._app, self._connections.requests)
        self._timeouts.set_deadline(
            self._limits.head_seconds if self._is_within_limits else self._limits.reserve_seconds
        )

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Notifies the application, drops what refers to this object, and stops all timers."""
        self._server_state.connections.discard(self)
        best_effort = self._connections.best_effort
        best_effort.cancel(self._address, self._on_turn)
        if not (self._is_trusted or (self._running and is_authenticated(self._running.scope))):
            best_effort.charge(CONNECTION_SECONDS)
        if self._running:
            self._running.disconnect()
        self.flow.resume_writing()
        self._timeouts.cancel()
        self._connections.unregister(self.transport)
        self._queue.clear()
        self._running = self._receiving = None
        del self.parser

    def eof_received(self) -> bool:
        """The client closed its sending side; True keeps this side open, for GET and HEAD only."""
        are_reads = [cycle.scope["method"] in ("GET", "HEAD") for cycle in (self._running, self._receiving) if cycle]
        if self._phase is not ReceivePhase.DONE or not self._is_busy or not all(are_reads):
            return False
        assert self._receiving
        self._receiving.keep_alive = False
        return True

    def pause_writing(self) -> None:
        """The socket buffer is full: sets the deadline for the client's next read."""
        self.flow.pause_writing()
        self._timeouts.schedule()

    def resume_writing(self) -> None:
        """The client reads again."""
        self.flow.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parses `data` within the limits, or what is left of it in later turns."""
        if self._phase is ReceivePhase.LINGER:
            self._discard(len(data))
        elif self._unparsed:
            self._unparsed += data
        elif self._must_wait(data):
            self._wait_for_turn(data)
        else:
            self._parse_input(data)

    def shutdown(self) -> None:
        """Server shutdown: closes an idle connection now, a busy or new one after its response."""
        if self._is_busy:
            assert self._receiving
            self._receiving.keep_alive = False
        elif self._phase is ReceivePhase.DONE and not self._unparsed:
            self.transport.close()

    def abort(self) -> None:
        """Closes the connection at once and cancels its work."""
        self._timeouts.cancel()
        self.transport.abort()

    def _parse_input(self, data: bytes) -> None:
        self._begin_request()
        try:
            self._parse_pieces(data)
            self._update_old_deadline()
            if self._phase is ReceivePhase.HEAD and not self._is_busy:
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
            self._checks.before_parsing(len(piece))
            self._parse(piece)
            self._checks.after_parsing(self._phase)
            if self._discards_body:
                self._discard(len(piece))
                if self._phase is ReceivePhase.LINGER:
                    return
            now = time.perf_counter()
            is_costly = now - started >= _COSTLY_SECONDS
            if is_costly or len(piece) < _COSTLY_PIECE_BYTES:  # not the plain pieces of a long body
                self._parse_seconds += now - started
            size, started = _COSTLY_PIECE_BYTES if is_costly else _PIECE_BYTES, now

    def _must_wait(self, data: bytes) -> bool:
        if self._is_trusted or self._phase is ReceivePhase.BODY:
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
        if self.transport.is_closing() or self._phase is ReceivePhase.LINGER:
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
        if self._phase is ReceivePhase.LINGER:
            self.abort()
        else:
            self._linger()

    def _set_parser(self, events: object) -> None:
        self.parser = httptools.HttpRequestParser(events)
        # What follows a request with Connection: close must not keep that request from its response.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

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
        request_line = b"%b / HTTP/%b\r\n" % (self.parser.get_method(), self.parser.get_http_version().encode())
        fields = [b"%b: %b\r\n" % field for field in self._headers if field[0] != b"upgrade"]
        self._set_parser(
            SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete, **callbacks)
        )
        self.parser.feed_data(b"".join([request_line, *fields, b"\r\n"]))
        is_repeating = False

    def on_message_begin(self) -> None:
        """Start of a request, which may be pipelined in the same packet as the previous one."""
        self._url, self._headers, self._expects_continue = b"", [], False
        self._discarded_bytes = 0
        self._begin_request()
        self._checks.begin_request()

    def on_url(self, url: bytes) -> None:
        """A part of the URL."""
        self._url += url
        self._checks.check_url(self._url, self.parser.get_method())

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header field, or a trailer field: the limits include trailers, and the application never sees them."""
        value = value.rstrip(b" \t")  # llhttp keeps the whitespace after the value (RFC 9110, 5.5)
        if self._phase is not ReceivePhase.HEAD:
            self._checks.check_trailer(name, value)
            return
        self._checks.check_field(name, value)
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self._expects_continue = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Passes the request to the application, which may have to await the body."""
        if len(self._queue) >= self._limits.max_pipelined:
            raise ApiError(400, "too many pipelined requests: wait for responses", code="pipelined")
        version = self.parser.get_http_version()
        scope = self._scope(self.parser.get_method(), version)
        is_modern = version != "1.0"  # RFC 9110, 10.1.1: HTTP/1.0 has no interim responses
        cycle = ResponseCycle(
            scope,
            self.transport,
            self.flow,
            self._on_response_complete,
            expects_continue=self._expects_continue and is_modern,
        )
        can_reuse = is_modern and self.parser.should_keep_alive()
        self._is_last = not can_reuse or self._connections.is_draining or not self._is_within_limits
        is_free = not self._is_busy
        self._receiving = cycle
        if is_free:
            self._start(cycle)
        else:
            self._queue.append(cycle)
        self._connections.mark_active(self.transport)
        self._phase = ReceivePhase.BODY
        self._has_old_deadline = True

    def on_body(self, body: bytes) -> None:
        """A chunk of body data; stops reading if the request is queued, to bound its buffer."""
        assert self._receiving
        self._receiving.add_body(body)
        self._checks.record_body()
        if self._has_unread_body:
            self.flow.pause_reading()  # until the application asks for more
            if self._receiving is not self._running:
                self.flow.block_reading(ReadBlock.QUEUE)

    def on_message_complete(self) -> None:
        """The request is complete, or its head if it offers an upgrade."""
        if self.parser.should_upgrade():
            return
        assert self._receiving
        self._receiving.end_body()
        if self._is_last:
            self._receiving.keep_alive = False
        self._phase = ReceivePhase.DONE
        self._has_old_deadline = True

    def _scope(self, method: bytes, version: str) -> Scope:
        """The ASGI scope of the request whose head is complete. Raises ApiError."""
        target = self._checks.check_head(method, version, self._url, self._headers)
        path = target.path.decode("ascii")
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method.decode("ascii"),
            "scheme": "http",
            "path": unquote(path) if "%" in path else path,
            "raw_path": target.path,
            "query_string": target.query,
            "root_path": "",
            "headers": self._headers,
            "client": self._client,
            "server": self._server,
            "state": self._app_state.copy(),
        }
        if target.host is not None:
            scope[TARGET_HOST_KEY] = target.host
        return scope

    def _start(self, cycle: ResponseCycle) -> None:
        self._running = cycle
        self._response_deadline = time.monotonic() + self._limits.response_seconds
        tasks = self._server_state.tasks
        task = self._loop.create_task(self._run(cycle))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _run(self, cycle: ResponseCycle) -> None:
        """Calls the application. RequestLogMiddleware turns its errors into responses, so none is expected here."""
        error: BaseException | None = None
        try:
            await self._app(cycle.scope, cycle.receive, cycle.send)
        except asyncio.CancelledError:
            self.transport.abort()
            raise
        except BaseException as raised:
            error = raised
        if error or not (cycle.is_complete or cycle.is_disconnected):
            _log.error("the application did not complete its response", exc_info=error)
            if not cycle.has_started and not cycle.is_disconnected:
                unexpected = ApiError(500, "internal error; look up the request id in the server's log")
                self.transport.write(early_response(unexpected, cycle.scope, self._connections.requests))
            self.transport.close()

    def _on_response_complete(self) -> None:
        """Starts the next queued request, if there is one."""
        self._server_state.total_requests += 1
        assert self._running
        self._running.body.clear()  # what the application did not read
        self._parse_seconds = 0.0
        self._is_trusted = is_authenticated(self._running.scope)
        if self.transport.is_closing() or self._phase is ReceivePhase.LINGER:
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
        if self._queue:
            self._start(self._queue.popleft())
        self._update_deadline()

    @property
    def _is_busy(self) -> bool:
        return self._running is not None and not self._running.is_complete

    @property
    def _has_unread_body(self) -> bool:
        """Whether the application has not read the body that is being received, so that more must wait."""
        cycle = self._receiving
        return cycle is not None and len(cycle.body) > SMALL_BODY and not cycle.is_complete

    @property
    def _is_receiving_body(self) -> bool:
        """Whether the body that is being received belongs to the request that is running."""
        return self._phase is ReceivePhase.BODY and self._receiving is self._running

    @property
    def _discards_body(self) -> bool:
        """Whether the response is complete before the body that is being received."""
        return self._is_receiving_body and not self._is_busy

    def _begin_request(self) -> None:
        """Called at the first byte of a request, and again once the parser has seen it."""
        phase = self._phase
        if phase in (ReceivePhase.NEW, ReceivePhase.DONE):
            self._phase = ReceivePhase.HEAD
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
        elif (phase := self._phase) in (ReceivePhase.HEAD, ReceivePhase.DONE):
            self._connections.mark_idle(self.transport, phase)
            is_head = phase is ReceivePhase.HEAD
            self._timeouts.set_deadline(self._limits.head_seconds if is_head else self._limits.idle_seconds)

    def _cut(self, reason: str = "write_stalled") -> None:
        self._connections.cut_by_reason[reason] += 1
        self.flow.discard_unsent()
        self.abort()

    def _on_input_timeout(self) -> None:
        phase = self._phase
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
        if self._discards_body:
            self._linger()
        elif self._is_receiving_body and self._running and self._running.has_started:
            self.transport.close()
        elif self._is_busy and not self._is_receiving_body:
            # Earlier requests are still being answered: the running one may finish, queued ones are dropped.
            self._queue.clear()
            assert self._running
            self._running.keep_alive = False
            self.flow.block_reading(ReadBlock.QUEUE)
            self._phase = ReceivePhase.LINGER
        else:
            self._send_error(error)

    def _send_error(self, error: ApiError) -> None:
        cycle = self._receiving if self._is_busy else None
        self._connections.best_effort.charge(REQUEST_SECONDS)
        scope = cycle.scope if cycle else None
        self.transport.write(early_response(error, scope, self._connections.requests))
        if cycle:  # the application sees a disconnect, and its next receive() writes no 100 Continue
            cycle.disconnect()
        self._linger()

    def _linger(self) -> None:
        """Discards input for a moment, then closes the connection."""
        self._phase = ReceivePhase.LINGER
        self._discarded_bytes, self._unparsed = 0, b""
        self._connections.mark_idle(self.transport, ReceivePhase.LINGER)
        self.flow.unblock_reading(*ReadBlock)
        self.transport.write_eof()
        self._timeouts.set_deadline(self._limits.linger_seconds)


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int] | None:
    """The address of one side; None for a socket without a port."""
    address = transport.get_extra_info(name)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
