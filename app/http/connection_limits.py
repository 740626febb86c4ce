"""Limits on connections, in all and by address, eviction when full, and the log line when descriptors run out.

Within the limits a connection is a guest like any other. One too many takes the place of one on which nothing is
being asked or answered (app/http/connection_limits.py): connections are cheap, and who only holds some must not keep
out who has a request. Where there is none it may stay in a small reserve, to be told why it is refused and so that
health probes get through; a crowd there pushes out its own oldest.
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
    """Looks until it is cancelled. uvloop closes the connections that it cannot accept, and tells nobody."""
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


# The address with the most of these connections gives one up, and of two the one that has had so many for longer: a
# crowd pushes out its own, and not the one connection of a slow client elsewhere. Every step takes the same time,
# however many there are: a flood must not make its own defence dear.


class EvictableConnection(Protocol):
    """One connection, as far as it is counted."""

    address: str

    def send_off(self) -> None:
        """Ends the connection at once."""
        ...


class WaitReason(enum.IntEnum):
    """What the service waits for on a connection on which nothing is being answered; the first kind goes first."""

    NEXT = 0
    """Another request: it idles."""
    ANY = 1
    """A first byte."""
    HEAD = 2
    """The rest of the headers."""
    CLOSE = 3
    """That the client closes: it was refused."""


class EvictionQueue:
    """The guests that wait, by address; those of one kind in the order in which they began to."""

    def __init__(self) -> None:
        self._waits: dict[EvictableConnection, WaitReason] = {}
        self._of: dict[str, tuple[OrderedDict[EvictableConnection, None], ...]] = {}
        self._n_of: dict[str, int] = {}
        self._having: list[OrderedDict[str, None]] = [OrderedDict()]
        """At n: the addresses that have n guests here, the longest first; the last one is never empty, but at 0."""

    def put(self, guest: EvictableConnection, wait: WaitReason) -> None:
        """It waits; nothing changes where it did already, for the same."""
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
        """It does not wait any more, if it did."""
        wait = self._waits.pop(guest, None)
        if wait is not None:
            del self._of[guest.address][wait][guest]
            self._resize(guest.address, -1)

    def first(self) -> EvictableConnection | None:
        """Who goes first of all."""
        address = next(iter(self._having[-1]), None)
        return None if address is None else self.first_of(address)

    def first_of(self, address: str) -> EvictableConnection | None:
        """Who goes first of this address."""
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
"""Descriptors that are no connections: pipes to the engine, the pages' files, the event loop's own."""
_LEAST_FILES = 128
"""With fewer it is not a service for a few, but one that fails here and there."""
_TOO_MANY = ("full", "address", "made_room")
_TOO_SLOW = ("head_timeout", "body_timeout", "write_stalled", "answer_timeout")
_TOO_MUCH = ("bad_request", "url_too_long", "headers_too_large", "pipelined")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one client, and all of them, may take of the front door."""

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
    """For a request from its headers to the last byte of its answer, however slowly its client sends and reads."""
    linger_seconds: float = 2.0
    """For the rest of a request that was refused, so that the answer is not lost in a reset."""
    reserve_seconds: float = 2.0
    """For the headers on a connection that is one too many."""
    pipelined: int = 16
    """Requests that may wait for their answers on one connection."""


class ConnectionLimits:
    """One for each server; owned by its event loop."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.is_draining = False
        self.cut = dict.fromkeys(_TOO_MANY + _TOO_SLOW + _TOO_MUCH, 0)
        """Connections that were refused or cut."""
        self._by_address: Counter[str] = Counter()
        self._guests: set[EvictableConnection] = set()
        """Those that count: who was sent off to make room is none of them, though its end is heard of later."""
        self._crowd = EvictionQueue()
        self._reserve: OrderedDict[EvictableConnection, None] = OrderedDict()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._guests)

    def enter(self, guest: EvictableConnection) -> bool:
        """Counts one more; False where it is one too many and only sits in the reserve."""
        has_room = self._has_room(guest.address)
        self._guests.add(guest)
        if not has_room:
            self._take_in_reserve(guest)
            return False
        self._by_address[guest.address] += 1
        self._crowd.put(guest, WaitReason.ANY)
        return True

    def leave(self, guest: EvictableConnection) -> None:
        """It is gone."""
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
        """Nothing is being asked or answered there: from now on it makes room for others."""
        if guest in self._guests and guest not in self._reserve:
            self._crowd.put(guest, wait)

    def wake(self, guest: EvictableConnection) -> None:
        """It has a request."""
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
    """Raises the soft limit of open files as far as needed and allowed; how many connections that is enough for.

    Raises ValueError where it is too low to begin.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(_LEAST_FILES, wanted + _RESERVE + _FILES)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if soft < _LEAST_FILES:
            raise ValueError(f"the limit of open files is {soft}: raise ulimit -n to at least {_LEAST_FILES}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _RESERVE - _FILES))
