"""Limits on connections, in total and by address. Eviction when full.

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
import logging
import math
import os
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from app.access.owner_shares import EntryCounts
from app.common.operating_system import RESERVED_CONNECTIONS
from app.http.best_effort import BestEffortTurns
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
