"""Limits on connections, in total and by address, and on each: size, time, backpressure. Eviction when full.

A connection beyond the limits evicts one without an active request: connections are cheap, and a client that only keeps
idle ones must not block clients that send requests. If none is idle, the new connection goes to a small reserve, where
requests get a 503 that says why and health probes are answered; when the reserve is full, its oldest connection closes.

Neither a plain limit nor a proxy replaces the eviction (promise R6, measured 2026-11-23 with as many idle connections
as the limit, and five times as many): a plain limit answered 0 of 18 other requests. nginx closes idle connections for
new ones itself, but not those with incomplete headers, and its limit_conn counts only connections whose headers are
complete: with incomplete ones beyond worker_connections it answered 0 of 3.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import fcntl
import logging
import math
import os
import socket
import struct
import termios
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

from app.access.owner_shares import EntryCounts
from app.common.event_loop import LazyTimer
from app.common.operating_system import RESERVED_CONNECTIONS
from app.http.best_effort import BestEffortTurns
from app.http.errors import ApiError
from app.http.request_log import RequestCounts

_CHECK_SECONDS = 1.0
_SPARE_FILES = 4
"""Kept for libuv: for a connection, for its reserved descriptor, and two for other threads."""
_LOG_INTERVAL_SECONDS = 60.0
_log = logging.getLogger("inkstream")


class ReceivePhase(enum.IntEnum):
    """What a connection received last. NEW or DONE --first byte--> HEAD --all headers--> BODY --all of it--> DONE.

    Connections without an active request are evicted in the order of these values.
    """

    DONE = 0
    """A request: the connection is idle once it is answered (keep-alive)."""
    NEW = 1
    """Nothing."""
    HEAD = 2
    """A part of the headers."""
    LINGER = 3
    """Input that is discarded: the connection is about to close, mostly after an error response."""
    BODY = 4
    """All headers; never evicted."""


class EvictionQueue:
    """Evictable connections by address, ordered by ReceivePhase, then by waiting time, longest first.

    The address with the most evictable connections loses one, and on a tie the address that did not change for longest:
    an attacker evicts its own connections, not the only one of a slow client elsewhere. Every operation takes constant
    time, so that a flood of connections stays cheap to handle.
    """

    def __init__(self) -> None:
        self._entries: dict[asyncio.Transport, tuple[str, ReceivePhase]] = {}
        self._queues: dict[str, list[OrderedDict[asyncio.Transport, None]]] = {}
        """By address, then by phase."""
        self._counts = EntryCounts[str]()

    def put(self, transport: asyncio.Transport, address: str, phase: ReceivePhase) -> None:
        """Adds a connection, or changes its phase; does nothing if it is already in `phase`."""
        if self._entries.get(transport) == (address, phase):
            return
        self.remove(transport)
        self._entries[transport] = address, phase
        if address not in self._queues:
            self._queues[address] = [OrderedDict() for _ in ReceivePhase]
        self._queues[address][phase][transport] = None
        self._counts.add(address)

    def remove(self, transport: asyncio.Transport) -> None:
        """Removes a connection, if it is queued."""
        if entry := self._entries.pop(transport, None):
            address, phase = entry
            del self._queues[address][phase][transport]
            self._counts.remove(address)
            if not any(self._queues[address]):
                del self._queues[address]

    def next_victim(self) -> asyncio.Transport | None:
        """The next connection to evict."""
        address = self._counts.largest
        return None if address is None else self.next_victim_of(address)

    def next_victim_of(self, address: str) -> asyncio.Transport | None:
        """The next connection of this address to evict."""
        return next((next(iter(queue)) for queue in self._queues.get(address, ()) if queue), None)


_CUT_REASONS = (
    *("full", "address", "made_room"),
    *("head_timeout", "body_timeout", "write_stalled", "answer_timeout"),
    *("bad_request", "url_too_long", "headers_too_large", "pipelined"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of one client, and of all clients together, on the HTTP server."""

    connections: int
    per_address: int
    header_bytes: int
    headers: int
    url_bytes: int
    head_seconds: float
    body_seconds: float
    write_seconds: float
    idle_seconds: float
    response_seconds: float
    """From a request's headers to the last byte of its response, however slowly its client sends and reads."""
    linger_seconds: float = 2.0
    """For reading the rest of a rejected request, so that a reset does not discard the response."""
    discarded_bytes: int = 1 << 20
    """Input that is read after a response and discarded: the rest of the body, then what comes while lingering."""
    parse_seconds: float = 0.0005
    """Time of the event loop for parsing the input of one request; beyond it the connection waits for turns."""
    reserve_seconds: float = 2.0
    """For the headers on a connection in the reserve."""
    max_pipelined: int = 16
    """Requests that may be queued on one connection."""


class ConnectionLimits:
    """Counts a server's connections, known by their transports, and evicts idle ones; owned by the event loop."""

    def __init__(self, limits: HttpLimits, has_key: Callable[[bytes], bool] = lambda _head: False) -> None:
        """has_key: whether the start of a request has a known API key."""
        self.limits = limits
        self._has_key = has_key
        self.is_draining = False
        self.cut_by_reason = dict.fromkeys(_CUT_REASONS, 0)
        """Number of rejected or aborted connections by reason, a label of the metric inkstream_connections_cut."""
        self.requests = RequestCounts()
        """Finished requests of all connections, for the metric inkstream_http_requests."""
        self.best_effort = BestEffortTurns()
        """Turns for requests without a key, and for input that is costly to parse."""
        self._open: dict[asyncio.Transport, str] = {}
        """Addresses of the connections within the limits; an evicted one is removed before it closes."""
        self._by_address: Counter[str] = Counter()
        self._evictable = EvictionQueue()
        self._reserve: dict[asyncio.Transport, None] = {}
        self._spare_files: list[int] = []
        self._is_out_of_files = False

    def has_known_key(self, head: bytes) -> bool:
        """Whether the start of a request has a known API key. The search for one is charged if it finds none."""
        started = time.perf_counter()
        if self._has_key(head):
            return True
        self.best_effort.charge(time.perf_counter() - started)
        return False

    async def monitor_descriptors(self) -> None:
        """Logs when file descriptors run out, and keeps the event loop from spinning then; runs until cancelled.

        libuv reserves a descriptor with which it accepts and closes connections when there is no other. If another
        thread opens a file meanwhile, libuv cannot reserve it again and polls the waiting connections without end. It
        tries again with each connection that it accepts. So the spare descriptors are closed when none is left, and new
        connections too, until the spare ones can be opened again.
        """
        last_logged = -math.inf
        try:
            while True:
                self._check_descriptors()
                if self._is_out_of_files and time.monotonic() - last_logged >= _LOG_INTERVAL_SECONDS:
                    last_logged = time.monotonic()
                    _log.error("no file descriptors left: new connections are closed; raise ulimit -n")
                await asyncio.sleep(_CHECK_SECONDS)
        finally:
            self._close_spare_files()

    def _check_descriptors(self) -> None:
        """Opens the spare descriptors and one more. Closes all of them if that fails, else only the one more."""
        try:
            while len(self._spare_files) <= _SPARE_FILES:
                self._spare_files.append(os.open(os.devnull, os.O_RDONLY))
            os.close(self._spare_files.pop())
            self._is_out_of_files = False
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._close_spare_files()
            self._is_out_of_files = True

    def _close_spare_files(self) -> None:
        while self._spare_files:
            os.close(self._spare_files.pop())

    @property
    def count(self) -> int:
        """Number of connections."""
        return len(self._open) + len(self._reserve)

    def register(self, transport: asyncio.Transport, address: str) -> bool:
        """Registers a connection, evicting an idle one if needed; False if the new one is only in the reserve.

        Without file descriptors the new one is closed.
        """
        if self._is_out_of_files:
            self._check_descriptors()
        if self._is_out_of_files:
            transport.abort()
            return False
        if not self._make_capacity(address):
            if len(self._reserve) >= RESERVED_CONNECTIONS:
                self._abort(next(iter(self._reserve)))
            self._reserve[transport] = None
            return False
        self._open[transport] = address
        self._by_address[address] += 1
        self.mark_idle(transport, ReceivePhase.NEW)
        return True

    def unregister(self, transport: asyncio.Transport) -> None:
        """Unregisters a closed connection."""
        self._reserve.pop(transport, None)
        address = self._open.pop(transport, None)
        if address is None:
            return
        self._evictable.remove(transport)
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def mark_idle(self, transport: asyncio.Transport, phase: ReceivePhase) -> None:
        """Marks a connection without an active request as evictable."""
        if transport in self._open:
            self._evictable.put(transport, self._open[transport], phase)

    def mark_active(self, transport: asyncio.Transport) -> None:
        """Marks a connection as active: it has a request."""
        self._evictable.remove(transport)

    def _make_capacity(self, address: str) -> bool:
        if self._by_address[address] >= self.limits.per_address:
            return self._evict(self._evictable.next_victim_of(address), "address")
        return len(self._open) < self.limits.connections or self._evict(self._evictable.next_victim(), "full")

    def _evict(self, transport: asyncio.Transport | None, reason: str) -> bool:
        self.cut_by_reason["made_room" if transport else reason] += 1
        if transport:
            self._abort(transport)
        return transport is not None

    def _abort(self, transport: asyncio.Transport) -> None:
        self.unregister(transport)
        transport.abort()


class RequestLimits:
    """Size limits of one connection. Each method that records input raises ApiError if it exceeds a limit."""

    def __init__(self, limits: HttpLimits) -> None:
        self.phase = ReceivePhase.NEW
        self._limits = limits
        self._n_headers = 0
        self._header_bytes = 0
        self._buffered_bytes = 0
        """Bytes received since the parser's last event, at most: the parser may buffer them."""

    def begin_headers(self) -> None:
        """The parser has seen the start of a request."""
        self._n_headers = self._header_bytes = self._buffered_bytes = 0

    def record_url(self, size: int) -> None:
        """Records the length of the URL so far."""
        self._buffered_bytes = 0
        if size > self._limits.url_bytes:
            message = f"the URL is longer than {self._limits.url_bytes} bytes: send a shorter one"
            raise ApiError(414, message, code="url_too_long")

    def record_header(self, size: int) -> None:
        """Records a header or trailer of `size` bytes."""
        self._buffered_bytes = 0
        self._n_headers += 1
        self._header_bytes += size
        if self._header_bytes > self._limits.header_bytes:
            raise self._headers_too_large()
        if self._n_headers > self._limits.headers:
            message = f"the request has more than {self._limits.headers} headers: send fewer"
            raise ApiError(431, message, code="headers_too_large")

    def record_body(self) -> None:
        """A chunk of body data has arrived."""
        self._buffered_bytes = 0

    def before_parsing(self, size: int) -> None:
        """Records `size` bytes before they are parsed."""
        self._buffered_bytes += size

    def after_parsing(self) -> None:
        """Checks after parsing that the parser's own buffers stay bounded."""
        limit = self._limits.header_bytes
        if self.phase is ReceivePhase.HEAD and self._buffered_bytes > self._limits.url_bytes + limit:
            raise self._headers_too_large()
        if self.phase is ReceivePhase.BODY and self._buffered_bytes > limit:
            raise ApiError(400, f"the body has over {limit} bytes of framing without data", code="bad_request")

    def _headers_too_large(self) -> ApiError:
        message = f"the headers are longer than {self._limits.header_bytes} bytes: send fewer or shorter ones"
        return ApiError(431, message, code="headers_too_large")


_MIN_READ_BYTES = 1024
"""Bytes that a slow reader must take within the timeout; a client that takes fewer has stalled."""


class ReadBlock(enum.Enum):
    """Why a connection is not read, whatever the application asks for."""

    QUEUE = "the body of a queued request, or what follows a rejected one"
    TURN = "input that waits for a turn to be parsed"


class ConnectionFlowControl(FlowControl):
    """uvicorn's flow control, plus a block on reading that the application cannot override, and stall detection."""

    def __init__(self, transport: Any, write_seconds: float) -> None:
        super().__init__(transport)
        # pause_writing() is then called as soon as the socket buffer is full, and nothing is buffered in this process.
        transport.set_write_buffer_limits(high=0)
        self._socket = transport.get_extra_info("socket")
        self._write_seconds = write_seconds
        self._blocks: set[ReadBlock] = set()
        self._unacknowledged = 0
        self.write_deadline = math.inf
        """Deadline of the client's next read in seconds of time.monotonic(); infinite while no output is pending."""

    def resume_reading(self) -> None:
        """Resumes reading, unless it is blocked."""
        if not self._blocks:
            super().resume_reading()

    def block_reading(self, reason: ReadBlock) -> None:
        """Stops reading until unblock_reading() for this reason."""
        self._blocks.add(reason)
        self.pause_reading()

    def unblock_reading(self, *reasons: ReadBlock) -> None:
        """Resumes reading, unless it is blocked for another reason."""
        self._blocks.difference_update(reasons)
        self.resume_reading()

    def pause_writing(self) -> None:
        """The socket buffer is full."""
        super().pause_writing()
        self._unacknowledged = self._unacknowledged_bytes()
        self.write_deadline = time.monotonic() + self._write_seconds

    def resume_writing(self) -> None:
        """The socket buffer has been drained."""
        super().resume_writing()
        self.write_deadline = math.inf

    def check_stalled(self, now: float) -> bool:
        """Returns whether the client has stopped reading; extends its deadline if it has not."""
        if now < self.write_deadline:
            return False
        unacknowledged = self._unacknowledged_bytes()
        if unacknowledged > self._unacknowledged - _MIN_READ_BYTES:
            return True
        self._unacknowledged, self.write_deadline = unacknowledged, now + self._write_seconds
        return False

    def discard_unsent(self) -> None:
        """Makes the kernel discard unread output when the connection closes."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _unacknowledged_bytes(self) -> int:
        """Bytes that the client has not acknowledged: those buffered here and those in the kernel."""
        buffered: int = self._transport.get_write_buffer_size()
        return buffered + int(struct.unpack("i", fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


class ConnectionTimeouts:
    """Calls `on_timeout` once when the input deadline passes, and `on_stall` when the client stops reading."""

    def __init__(
        self, flow: ConnectionFlowControl, on_timeout: Callable[[], None], on_stall: Callable[[], None]
    ) -> None:
        self._flow = flow
        self._on_timeout = on_timeout
        self._on_stall = on_stall
        self._timer = LazyTimer(self._on_timer)
        self._deadline = math.inf

    def set_deadline(self, seconds: float) -> None:
        """Sets the deadline for the client's input."""
        self._deadline = time.monotonic() + seconds
        self.schedule()

    def schedule(self) -> None:
        """Schedules the timer for the earliest deadline."""
        if (due := min(self._deadline, self._flow.write_deadline)) < math.inf:
            self._timer.set(due)

    def cancel(self) -> None:
        """Cancels the timer."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        """Timer callback: a deadline may have passed or moved."""
        now = time.monotonic()
        if self._flow.check_stalled(now):
            self._on_stall()
            return
        if now >= self._deadline:
            self._deadline = math.inf
            self._on_timeout()
        self.schedule()
