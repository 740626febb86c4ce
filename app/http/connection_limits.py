"""Limits on connections, in total and by address; eviction when full; a log line when file descriptors run out.

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
import os
import resource
import time
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass

_CHECK_SECONDS = 1.0
_LOG_INTERVAL_SECONDS = 60.0
_log = logging.getLogger("inkstream")


async def monitor_descriptors() -> None:
    """Logs when file descriptors run out, until cancelled. uvloop silently closes connections that it cannot accept."""
    last_logged = float("-inf")
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if time.monotonic() - last_logged >= _LOG_INTERVAL_SECONDS:
                last_logged = time.monotonic()
                _log.error("no file descriptors left: new connections are closed; raise ulimit -n")


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
        self._addresses: defaultdict[int, OrderedDict[str, None]] = defaultdict(OrderedDict)
        """By number of connections."""
        self._most = 0
        """Connections of the address that has the most."""

    def put(self, transport: asyncio.Transport, address: str, phase: ReceivePhase) -> None:
        """Adds a connection, or changes its phase; does nothing if it is already in `phase`."""
        if self._entries.get(transport) == (address, phase):
            return
        self.remove(transport)
        self._entries[transport] = address, phase
        if address not in self._queues:
            self._queues[address] = [OrderedDict() for _ in ReceivePhase]
        self._queues[address][phase][transport] = None
        self._count(address, 1)

    def remove(self, transport: asyncio.Transport) -> None:
        """Removes a connection, if it is queued."""
        if entry := self._entries.pop(transport, None):
            address, phase = entry
            del self._queues[address][phase][transport]
            self._count(address, -1)

    def next_victim(self) -> asyncio.Transport | None:
        """The next connection to evict."""
        return self.next_victim_of(next(iter(self._addresses[self._most]))) if self._most else None

    def next_victim_of(self, address: str) -> asyncio.Transport | None:
        """The next connection of this address to evict."""
        return next((next(iter(queue)) for queue in self._queues.get(address, ()) if queue), None)

    def _count(self, address: str, change: int) -> None:
        count = sum(map(len, self._queues[address]))
        self._addresses[count - change].pop(address, None)
        if count:
            self._addresses[count][address] = None
        else:
            del self._queues[address]
        self._most = max(self._most, count)
        while self._most and not self._addresses[self._most]:
            del self._addresses[self._most]
            self._most -= 1


_RESERVE_SIZE = 32
_RESERVED_FILES = 64
"""Descriptors reserved for other uses: pipes to the engine, static files, the event loop."""
_MIN_FILES = 128
"""With fewer descriptors the service would fail at random."""
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
    reserve_seconds: float = 2.0
    """For the headers on a connection in the reserve."""
    max_pipelined: int = 16
    """Requests that may be queued on one connection."""


class ConnectionLimits:
    """Counts a server's connections, known by their transports, and evicts idle ones; owned by the event loop."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.is_draining = False
        self.cut_by_reason = dict.fromkeys(_CUT_REASONS, 0)
        """Number of rejected or aborted connections by reason, a label of the metric inkstream_connections_cut."""
        self._open: dict[asyncio.Transport, str] = {}
        """Addresses of the connections within the limits; an evicted one is removed before it closes."""
        self._by_address: Counter[str] = Counter()
        self._evictable = EvictionQueue()
        self._reserve: dict[asyncio.Transport, None] = {}

    @property
    def count(self) -> int:
        """Number of connections."""
        return len(self._open) + len(self._reserve)

    def register(self, transport: asyncio.Transport, address: str) -> bool:
        """Registers a connection, evicting an idle one if needed; False if the new one is only in the reserve."""
        if not self._make_capacity(address):
            if len(self._reserve) >= _RESERVE_SIZE:
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


def ensure_file_limit(requested: int) -> int:
    """Raises the soft limit of open files for `requested` connections, as far as allowed; returns how many fit.

    Raises ValueError if the limit is too low for the service to start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return requested
    needed = max(_MIN_FILES, requested + _RESERVE_SIZE + _RESERVED_FILES)
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if soft < _MIN_FILES:
            raise ValueError(f"the limit of open files is {soft}: raise ulimit -n to at least {_MIN_FILES}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(requested, soft - _RESERVE_SIZE - _RESERVED_FILES))
