"""Limits on connections, in total and by address; eviction when full; a log line when file descriptors run out.

A connection beyond the limits evicts one without an active request: connections are cheap, and a client that only keeps
idle ones must not block clients that send requests. If none is idle, the new connection goes to a small reserve, where
requests get a 503 that says why and health probes are answered; when the reserve is full, its oldest connection closes.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import os
import resource
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Protocol

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


# The address with the most evictable connections loses one, and on a tie the address that reached this number first: an
# attacker evicts its own connections, not the only one of a slow client elsewhere. Every operation is O(1), so that a
# flood of connections stays cheap to handle.


class EvictableConnection(Protocol):
    """A connection that can be evicted."""

    address: str

    def abort(self) -> None:
        """Closes the connection at once."""
        ...


class WaitReason(enum.IntEnum):
    """What an idle connection is waiting for; lower values are evicted first."""

    NEXT_REQUEST = 0
    """Another request: the connection is idle (keep-alive)."""
    FIRST_BYTE = 1
    """The first byte of the first request."""
    HEADERS = 2
    """The rest of the headers."""
    CLIENT_CLOSE = 3
    """The client's close, after an error response."""


class EvictionQueue:
    """Evictable connections by address, ordered by WaitReason, then by waiting time, longest first."""

    def __init__(self) -> None:
        self._reasons: dict[EvictableConnection, WaitReason] = {}
        self._queues: dict[str, tuple[OrderedDict[EvictableConnection, None], ...]] = {}
        self._counts: dict[str, int] = {}
        self._addresses_by_count: list[OrderedDict[str, None]] = [OrderedDict()]
        """At index n: the addresses with n connections, oldest first; the last entry is only empty at index 0."""

    def put(self, connection: EvictableConnection, reason: WaitReason) -> None:
        """Adds a connection, or changes its reason; does nothing if it already waits for `reason`."""
        old = self._reasons.get(connection)
        if old is reason:
            return
        self._reasons[connection] = reason
        queues = self._queues.get(connection.address)
        if queues is None:
            queues = self._queues[connection.address] = tuple(OrderedDict() for _ in WaitReason)
        queues[reason][connection] = None
        if old is None:
            self._change_count(connection.address, 1)
        else:
            del queues[old][connection]

    def remove(self, connection: EvictableConnection) -> None:
        """Removes a connection, if it is queued."""
        reason = self._reasons.pop(connection, None)
        if reason is not None:
            del self._queues[connection.address][reason][connection]
            self._change_count(connection.address, -1)

    def next_victim(self) -> EvictableConnection | None:
        """The next connection to evict."""
        address = next(iter(self._addresses_by_count[-1]), None)
        return None if address is None else self.next_victim_of(address)

    def next_victim_of(self, address: str) -> EvictableConnection | None:
        """The next connection of this address to evict."""
        queues = self._queues.get(address, ())
        return next((next(iter(queue)) for queue in queues if queue), None)

    def _change_count(self, address: str, change: int) -> None:
        old = self._counts.get(address, 0)
        new = old + change
        if old:
            del self._addresses_by_count[old][address]
        if new:
            if new == len(self._addresses_by_count):
                self._addresses_by_count.append(OrderedDict())
            self._addresses_by_count[new][address] = None
            self._counts[address] = new
        else:
            del self._counts[address], self._queues[address]
        while len(self._addresses_by_count) > 1 and not self._addresses_by_count[-1]:
            self._addresses_by_count.pop()


_RESERVE_SIZE = 32
_RESERVED_FILES = 64
"""Descriptors reserved for other uses: pipes to the engine, static files, the event loop."""
_MIN_FILES = 128
"""With fewer descriptors the service would fail at random."""
_LIMIT_REASONS = ("full", "address", "made_room")
_TIMEOUT_REASONS = ("head_timeout", "body_timeout", "write_stalled", "answer_timeout")
_REQUEST_REASONS = ("bad_request", "url_too_long", "headers_too_large", "pipelined")


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
    """Counts a server's connections and evicts idle ones; owned by the event loop."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.is_draining = False
        self.cut_by_reason = dict.fromkeys(_LIMIT_REASONS + _TIMEOUT_REASONS + _REQUEST_REASONS, 0)
        """Number of rejected or aborted connections by reason, a label of the metric inkstream_connections_cut."""
        self._by_address: Counter[str] = Counter()
        self._connections: set[EvictableConnection] = set()
        """Open connections; an evicted one is removed before its transport closes."""
        self._evictable = EvictionQueue()
        self._reserve: OrderedDict[EvictableConnection, None] = OrderedDict()

    @property
    def count(self) -> int:
        """Number of connections."""
        return len(self._connections)

    def register(self, connection: EvictableConnection) -> bool:
        """Registers a connection, evicting an idle one if needed; False if the new one is only in the reserve."""
        is_within_limits = self._make_capacity(connection.address)
        self._connections.add(connection)
        if not is_within_limits:
            self._add_to_reserve(connection)
            return False
        self._by_address[connection.address] += 1
        self._evictable.put(connection, WaitReason.FIRST_BYTE)
        return True

    def unregister(self, connection: EvictableConnection) -> None:
        """Unregisters a closed connection."""
        if connection not in self._connections:
            return
        self._connections.remove(connection)
        if connection in self._reserve:
            del self._reserve[connection]
            return
        self._evictable.remove(connection)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def mark_idle(self, connection: EvictableConnection, reason: WaitReason) -> None:
        """Marks a connection without an active request as evictable."""
        if connection in self._connections and connection not in self._reserve:
            self._evictable.put(connection, reason)

    def mark_active(self, connection: EvictableConnection) -> None:
        """Marks a connection as active: it has a request."""
        self._evictable.remove(connection)

    def _make_capacity(self, address: str) -> bool:
        if self._by_address[address] >= self.limits.per_address and not self._evict(
            self._evictable.next_victim_of(address)
        ):
            self.cut_by_reason["address"] += 1
            return False
        if self.count - len(self._reserve) >= self.limits.connections and not self._evict(
            self._evictable.next_victim()
        ):
            self.cut_by_reason["full"] += 1
            return False
        return True

    def _evict(self, connection: EvictableConnection | None) -> bool:
        if connection is None:
            return False
        self.cut_by_reason["made_room"] += 1
        self.unregister(connection)
        connection.abort()
        return True

    def _add_to_reserve(self, connection: EvictableConnection) -> None:
        if len(self._reserve) >= _RESERVE_SIZE:
            oldest = next(iter(self._reserve))
            self.unregister(oldest)
            oldest.abort()
        self._reserve[connection] = None


def ensure_file_limit(requested: int) -> int:
    """Raises the soft limit of open files for `requested` connections, as far as allowed; returns how many fit.

    Raises ValueError if the limit is too low for the service to start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(_MIN_FILES, requested + _RESERVE_SIZE + _RESERVED_FILES)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if soft < _MIN_FILES:
            raise ValueError(f"the limit of open files is {soft}: raise ulimit -n to at least {_MIN_FILES}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        requested if soft == resource.RLIM_INFINITY else max(1, min(requested, soft - _RESERVE_SIZE - _RESERVED_FILES))
    )
