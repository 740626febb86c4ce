"""Who is connected: how many in all and from each address, who waits, and who came too many. Knows no HTTP.

Within the limits a connection is a guest like any other. One too many takes the place of one on which nothing is being
asked or answered (eviction.py): connections are cheap, and who only holds some must not keep out who has a request.
Where there is none it may stay in a small reserve, to be told why it is refused and so that health probes get through;
a crowd there pushes out its own oldest.
"""

from __future__ import annotations

import resource
from collections import Counter, OrderedDict
from dataclasses import dataclass

from app.http.eviction import EvictableConnection, EvictionQueue, WaitReason

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
