"""Differential test of request framing: the service's protocol class in memory against h11, on the same bytes."""

from __future__ import annotations

import asyncio
import logging
import re
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from app.http.connection_limits import ConnectionLimits, HttpLimits
from app.http.host_filter import TARGET_HOST_KEY, HostFilter
from app.http.http_protocol import HttpProtocol
from app.http.request_log import RequestLogMiddleware

LIMITS = HttpLimits(
    connections=1000,
    per_address=1000,
    header_bytes=16384,
    headers=100,
    url_bytes=8192,
    head_seconds=60,
    body_seconds=60,
    write_seconds=60,
    idle_seconds=60,
    response_seconds=60,
    parse_seconds=60,  # so that a busy machine changes nothing
)
_ABSOLUTE = re.compile(
    rb"[A-Za-z][A-Za-z0-9+.-]*://(?:[^/?#]*@)?(?:\[([^]/?#]*)\]|([^:/?#\[\]]*))(?::[0-9]*)?(/[^?]*)(?:\?(.*))?", re.S
)
_STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")


@dataclass(slots=True, kw_only=True)
class Request:
    """A parsed request."""

    method: bytes
    target: tuple[bytes | None, bytes, bytes]
    """Host (of an absolute URL), path and query."""
    version: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    is_complete: bool = False
    is_unread: bool = False
    """The application responded without reading the body."""


@dataclass(slots=True)
class Served:
    """Record of one connection."""

    requests: list[Request | None] = field(default_factory=list)
    """In order of arrival; None for a request that the application rejected for its Host."""
    output: bytearray = field(default_factory=bytearray)
    is_closed: bool = False
    """Closed by the service, before the client closed."""
    log: list[str] = field(default_factory=list)

    @property
    def statuses(self) -> list[int]:
        """Status codes of all final responses."""
        return [status for status in map(int, _STATUS.findall(self.output)) if status >= 200]


class MemoryTransport(asyncio.Transport):
    """Stores what the protocol writes. Raises where uvloop's TCP transport raises."""

    def __init__(self, output: bytearray) -> None:
        super().__init__()
        self._output = output
        self._has_ended = False
        self._is_closing = False
        self.is_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        if self._has_ended:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not self._is_closing:
            self._output += data

    def write_eof(self) -> None:
        self._has_ended = True

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    def abort(self) -> None:
        self._is_closing = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    @property
    def has_ended(self) -> bool:
        """Whether the service ended the connection."""
        return self._has_ended or self._is_closing


class Harness(logging.Handler):
    """Runs the protocol of the service over memory, with an application that records each request and returns 200."""

    def __init__(
        self,
        protocol: type[HttpProtocol] = HttpProtocol,
        *,
        limits: HttpLimits = LIMITS,
        before_reading: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__(logging.WARNING)
        self.reads_body = True
        self._limits = limits
        self._before_reading = before_reading
        self._config = uvicorn.Config(
            self._application, log_config=None, access_log=False, ws="none", interface="asgi3"
        )
        self._config.load()
        self._protocol = protocol
        self._recorder = RequestLogMiddleware(HostFilter(self._record))
        self._served = Served()

    def __enter__(self) -> Harness:
        """Starts recording the logs of the whole process."""
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Records warnings and errors: no client input may cause one."""
        self._served.log.append(f"{record.getMessage()} {record.exc_info[1] if record.exc_info else ''}")

    async def serve(
        self, packets: tuple[bytes, ...], *, then: Callable[[HttpProtocol], Awaitable[object]] | None = None
    ) -> Served:
        """Serves one connection: the packets, then `then`, then FIN. An empty packet is a FIN too."""
        served = self._served = Served()
        state = ServerState()
        connection = self._protocol(ConnectionLimits(self._limits), self._config, state, {}, asyncio.get_running_loop())
        transport = MemoryTransport(served.output)
        connection.connection_made(transport)
        stride = 1 + len(packets) // 8
        for at, packet in enumerate(packets):
            if transport.has_ended:
                break
            _deliver(connection, transport, packet)
            if at % stride == 0:
                await asyncio.sleep(0)
            if transport.is_paused:
                await self._settle(state)
        await self._settle(state)
        if then:
            await then(connection)
            await self._settle(state)
        served.is_closed = transport.has_ended
        transport.abort()
        if hasattr(connection, "parser"):  # else `then` closed it
            connection.connection_lost(None)
        await self._settle(state)
        assert not state.tasks, "a request task outlives its connection"
        return served

    async def _settle(self, state: ServerState) -> None:
        """Runs the event loop until it is idle."""
        quiet = 0
        while quiet < 4 and state.tasks:
            before = len(self._served.output), len(self._served.requests), len(state.tasks)
            await asyncio.sleep(0)
            after = len(self._served.output), len(self._served.requests), len(state.tasks)
            quiet = quiet + 1 if before == after else 0

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._served.requests.append(None)
        await self._recorder(scope, receive, send)

    async def _record(self, scope: Scope, receive: Receive, send: Send) -> None:
        target = scope.get(TARGET_HOST_KEY), scope["raw_path"], scope["query_string"]
        request = Request(
            method=scope["method"].encode(),
            target=target,
            version=scope["http_version"].encode(),
            headers=_lowercase_coding(scope["headers"]),
        )
        request.is_unread = not self.reads_body
        self._served.requests[-1] = request
        if self._before_reading:
            await self._before_reading()
        while not (request.is_complete or request.is_unread):
            event = await receive()
            if event["type"] == "http.disconnect":
                return
            request.body += event["body"]
            request.is_complete = not event["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def _lowercase_coding(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """h11 shows the coding in lower case."""
    return [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in headers]


def _deliver(connection: HttpProtocol, transport: MemoryTransport, packet: bytes) -> None:
    if packet:
        connection.data_received(packet)
    elif not connection.eof_received():
        transport.close()


@dataclass(slots=True)
class Reference:
    """The requests that h11 parsed from a byte stream."""

    requests: list[Request] = field(default_factory=list)
    error: str = ""
    leniencies: Counter[str] = field(default_factory=Counter)


_REQUEST_LINE = re.compile(rb"([A-Z-]+)( +)([!-~]+)( +)(HTTP|RTSP|ICE)(/[0-9]\.[0-9]\r\n)")


def _normalized(data: bytes, used: Counter[str]) -> bytes:
    """Rewrites the next request to the only form that h11 accepts.

    llhttp accepts other forms too, which change neither the end nor the meaning of a request: empty lines before it
    (RFC 9112, 2.2: a server SHOULD ignore them), several spaces in the request line (RFC 9112, 3: a recipient MAY
    accept them), and the names of two other protocols with the syntax of HTTP/1. httptools hides all three from a
    protocol.
    """
    stripped = data.lstrip(b"\r\n")
    used["empty lines before a request"] += stripped != data
    if not (found := _REQUEST_LINE.match(stripped)):
        return stripped
    method, space, target, other_space, protocol, version = found.groups()
    used["several spaces in a request line"] += space + other_space != b"  "
    used["RTSP or ICE for HTTP"] += protocol != b"HTTP"
    return b"%b %b HTTP%b" % (method, target, version) + stripped[found.end() :]


# h11 limits a chunk size to 20 digits, leading zeros included; RFC 9112, 7.1 has no such limit.
h11._readers.chunk_header_re = re.compile(h11._readers.chunk_header_re.pattern.replace(b"{1,20}", b"+"))


def read_with_h11(data: bytes) -> Reference:
    """Parses all requests until the data or the connection ends."""
    reference = Reference()
    try:
        while data := _normalized(data, reference.leniencies):
            connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
            connection.receive_data(data)
            request = _next_request(connection, reference)
            if request is None or not request.is_complete:
                break
            if connection.their_state is h11.MIGHT_SWITCH_PROTOCOL:  # decline the offer
                connection.send(h11.Response(status_code=400, headers=[("Content-Length", "0")]))
                connection.send(h11.EndOfMessage())
            if connection.their_state is not h11.DONE:
                break
            data = connection.trailing_data[0]
    except h11.RemoteProtocolError as error:
        reference.error = str(error)
    return reference


def _next_request(connection: h11.Connection, reference: Reference) -> Request | None:
    request: Request | None = None
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            request = Request(
                method=event.method,
                target=_parts(event.target),
                version=event.http_version,
                headers=list(event.headers),
            )
            reference.requests.append(request)
        elif isinstance(event, h11.Data) and request:
            request.body += event.data
        elif isinstance(event, h11.EndOfMessage) and request:
            request.is_complete = True
            return request
        else:
            return request


def _parts(target: bytes) -> tuple[bytes | None, bytes, bytes]:
    if found := _ABSOLUTE.fullmatch(target):
        literal, name, path, query = found.groups()
        return (b"[%b]" % literal if literal else name), path, query or b""
    path, _, query = target.partition(b"?")
    return None, path, query


def difference(served: Served, reference: Reference) -> str | None:
    """How the service differs from the reference, or None. The service may reject what h11 accepts."""
    if served.log:
        return f"logged {served.log}"
    statuses = served.statuses
    if any(status >= 500 for status in statuses):
        return f"answered {statuses}"
    n_read = sum(request.is_complete for request in served.requests if request)
    n_unread = sum(request.is_unread for request in served.requests if request)  # may be rejected before their response
    n_answered = statuses.count(200)
    n_refused = len(statuses) - n_answered - served.requests.count(None)
    if not n_read <= n_answered <= n_read + n_unread or n_refused not in (0, 1) or (n_refused and not served.is_closed):
        return f"{n_read} requests read, {n_unread} unread, {statuses}"
    for at, ours in enumerate(served.requests):
        if ours is None:
            continue
        if at >= len(reference.requests):
            return f"request {at} is one that h11 does not see: {ours}; h11: {reference.error}"
        if found := _unlike(ours, reference.requests[at], served.is_closed):
            return f"request {at}: {found}\n  ours {ours}\n  h11  {reference.requests[at]} {reference.error}"
    if len(served.requests) < len(reference.requests) and not served.is_closed:
        return f"{len(served.requests)} requests without a refusal, h11 sees {len(reference.requests)}"
    return None


def _unlike(ours: Request, theirs: Request, is_closed: bool) -> str | None:
    if (ours.method, ours.target, ours.version) != (theirs.method, theirs.target, theirs.version):
        return "request lines differ"
    if ours.headers != theirs.headers:
        return "fields differ"
    framing = [name for name, _ in ours.headers if name in (b"content-length", b"transfer-encoding")]
    if len(framing) > 1 or (ours.version == b"1.0" and b"transfer-encoding" in framing):
        return "ambiguous framing (RFC 9112, 6.1 and 6.3), which h11 accepts, and a proxy may read in another way"
    if ours.is_unread:
        return None
    if ours.is_complete and not theirs.is_complete:
        return "h11 does not see its end"
    if (ours.is_complete and ours.body != theirs.body) or not theirs.body.startswith(ours.body):
        return "bodies differ"
    if theirs.is_complete and not ours.is_complete and not is_closed:
        return "we do not see its end"
    return None


async def compare(harness: Harness, packets: tuple[bytes, ...]) -> tuple[str | None, Served, Reference]:
    """Sends one message through both; for one in eight the application responds unread, as for an invalid key."""
    data = b"".join(packets)
    harness.reads_body = zlib.crc32(data) % 8 != 0
    served = await harness.serve(packets)
    reference = read_with_h11(data)
    return difference(served, reference), served, reference
