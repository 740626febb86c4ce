"""Limits on connections, in all and by address, eviction when full, and the log line when descriptors run out.

A connection beyond the limits evicts one without an active request: connections are cheap, and a client that only holds
idle ones must not block clients that send requests. If none is idle, the new connection goes to a small reserve, where
it gets an error that says why, and health probes are answered; when the reserve is full, its oldest connection closes.
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

_LOOK_SECONDS = 1.0
_SAY_SECONDS = 60.0
_log = logging.getLogger("inkstream")


async def watch_descriptors() -> None:
    """Logs when descriptors run out; runs until cancelled. uvloop silently closes connections that it cannot accept."""
    said = float("-inf")
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            if time.monotonic() - said >= _SAY_SECONDS:
                said = time.monotonic()
                _log.error("no file descriptors left: new connections are closed; raise ulimit -n")


# The address with the most of these connections loses one, and on a tie the address that has had so many for longer:
# an attacker evicts its own connections, not the only one of a slow client elsewhere. Every operation is O(1), so that
# a flood does not make its own defense expensive.


class EvictableConnection(Protocol):
    """A connection that can be evicted."""

    address: str

    def send_off(self) -> None:
        """Ends the connection at once."""
        ...


class WaitReason(enum.IntEnum):
    """What an idle connection is waiting for; lower values are evicted first."""

    NEXT = 0
    """Another request: the connection is idle (keep-alive)."""
    ANY = 1
    """The first byte of the first request."""
    HEAD = 2
    """The rest of the headers."""
    CLOSE = 3
    """The client's close, after an error response."""


class EvictionQueue:
    """Evictable connections by address; within a WaitReason, the one that has waited longest comes first."""

    def __init__(self) -> None:
        self._waits: dict[EvictableConnection, WaitReason] = {}
        self._of: dict[str, tuple[OrderedDict[EvictableConnection, None], ...]] = {}
        self._n_of: dict[str, int] = {}
        self._having: list[OrderedDict[str, None]] = [OrderedDict()]
        """At index n: the addresses with n connections here, oldest first; the last entry is only empty at 0."""

    def put(self, guest: EvictableConnection, wait: WaitReason) -> None:
        """Adds a connection, or changes its reason; does nothing if it already waits for `wait`."""
        old = self._waits.get(guest)
        if old is wait:
            return
        self._waits[guest] = wait
        kinds = self._of.get(guest.address)
        if kinds is None:
            kinds = self._of[guest.address] = tuple(OrderedDict() for _ in WaitReason)
        kinds[wait][guest] = None
        if old is None:
            self._resize(guest.address, 1)
        else:
            del kinds[old][guest]

    def drop(self, guest: EvictableConnection) -> None:
        """Removes a connection, if it is here."""
        wait = self._waits.pop(guest, None)
        if wait is not None:
            del self._of[guest.address][wait][guest]
            self._resize(guest.address, -1)

    def first(self) -> EvictableConnection | None:
        """The next connection to evict."""
        address = next(iter(self._having[-1]), None)
        return None if address is None else self.first_of(address)

    def first_of(self, address: str) -> EvictableConnection | None:
        """The next connection of this address to evict."""
        kinds = self._of.get(address, ())
        return next((next(iter(kind)) for kind in kinds if kind), None)

    def _resize(self, address: str, by: int) -> None:
        old = self._n_of.get(address, 0)
        new = old + by
        if old:
            del self._having[old][address]
        if new:
            if new == len(self._having):
                self._having.append(OrderedDict())
            self._having[new][address] = None
            self._n_of[address] = new
        else:
            del self._n_of[address], self._of[address]
        while len(self._having) > 1 and not self._having[-1]:
            self._having.pop()


_RESERVE = 32
_FILES = 64
"""Descriptors reserved for other uses: pipes to the engine, static files, the event loop."""
_LEAST_FILES = 128
"""With fewer descriptors the service would fail at random."""
_TOO_MANY = ("full", "address", "made_room")
_TOO_SLOW = ("head_timeout", "body_timeout", "write_stalled", "answer_timeout")
_TOO_MUCH = ("bad_request", "url_too_long", "headers_too_large", "pipelined")


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
    answer_seconds: float
    """From a request's headers to the last byte of its response, however slowly its client sends and reads."""
    linger_seconds: float = 2.0
    """For reading the rest of a refused request, so that a reset does not discard the response."""
    reserve_seconds: float = 2.0
    """For the headers on a connection in the reserve."""
    pipelined: int = 16
    """Requests that may be queued on one connection."""


class ConnectionLimits:
    """Counts a server's connections and evicts idle ones; owned by the event loop."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.is_draining = False
        self.cut = dict.fromkeys(_TOO_MANY + _TOO_SLOW + _TOO_MUCH, 0)
        """Connections that were refused or cut, by reason."""
        self._by_address: Counter[str] = Counter()
        self._guests: set[EvictableConnection] = set()
        """Connections that count toward the limits; an evicted one is removed before its transport closes."""
        self._crowd = EvictionQueue()
        self._reserve: OrderedDict[EvictableConnection, None] = OrderedDict()

    @property
    def count(self) -> int:
        """Number of connections."""
        return len(self._guests)

    def enter(self, guest: EvictableConnection) -> bool:
        """Registers a connection; False if it exceeds the limits and is only in the reserve."""
        has_room = self._has_room(guest.address)
        self._guests.add(guest)
        if not has_room:
            self._take_in_reserve(guest)
            return False
        self._by_address[guest.address] += 1
        self._crowd.put(guest, WaitReason.ANY)
        return True

    def leave(self, guest: EvictableConnection) -> None:
        """Unregisters a closed connection."""
        if guest not in self._guests:
            return
        self._guests.remove(guest)
        if guest in self._reserve:
            del self._reserve[guest]
            return
        self._crowd.drop(guest)
        self._by_address[guest.address] -= 1
        if not self._by_address[guest.address]:
            del self._by_address[guest.address]

    def rest(self, guest: EvictableConnection, wait: WaitReason) -> None:
        """Marks a connection without an active request as evictable."""
        if guest in self._guests and guest not in self._reserve:
            self._crowd.put(guest, wait)

    def wake(self, guest: EvictableConnection) -> None:
        """Marks a connection as active: it has a request."""
        self._crowd.drop(guest)

    def _has_room(self, address: str) -> bool:
        if self._by_address[address] >= self.limits.per_address and not self._make_room(self._crowd.first_of(address)):
            self.cut["address"] += 1
            return False
        if self.count - len(self._reserve) >= self.limits.connections and not self._make_room(self._crowd.first()):
            self.cut["full"] += 1
            return False
        return True

    def _make_room(self, guest: EvictableConnection | None) -> bool:
        if guest is None:
            return False
        self.cut["made_room"] += 1
        self.leave(guest)
        guest.send_off()
        return True

    def _take_in_reserve(self, guest: EvictableConnection) -> None:
        if len(self._reserve) >= _RESERVE:
            oldest = next(iter(self._reserve))
            self.leave(oldest)
            oldest.send_off()
        self._reserve[guest] = None


def possible_connections(wanted: int) -> int:
    """Raises the soft limit of open files as far as needed and allowed; returns how many connections fit.

    Raises ValueError if the limit is too low to start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(_LEAST_FILES, wanted + _RESERVE + _FILES)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if soft < _LEAST_FILES:
            raise ValueError(f"the limit of open files is {soft}: raise ulimit -n to at least {_LEAST_FILES}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _RESERVE - _FILES))
