"""Who is connected: how many in all and from each address, who idles, and who came too many. Knows no HTTP.

Within the limits a connection is a guest like any other. One too many first takes the place of the longest idle one.
Where nobody idles it may stay in a small reserve, to be told why it is refused and so that health probes get through;
a crowd there pushes out its own oldest.
"""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

_RESERVE = 32
_FILES = 64
"""Descriptors that are no connections: pipes to the engine, the pages' files, the event loop's own."""


_TOO_MANY = ("full", "address")
_TOO_SLOW = ("head_timeout", "body_timeout", "write_stalled")
_TOO_MUCH = ("bad_request", "url_too_long", "headers_too_large", "pipelined")


class Guest(Protocol):
    """One connection, as far as it is counted."""

    address: str

    def send_off(self) -> None:
        """Ends the connection at once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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
    linger_seconds: float = 2.0
    """For the rest of a request that was refused, so that the answer is not lost in a reset."""
    reserve_seconds: float = 2.0
    """For the headers on a connection that is one too many."""
    pipelined: int = 16
    """Requests that may wait for their answers on one connection."""


class Connections:
    """One for each server; owned by its event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.is_draining = False
        self.count = 0
        self.cut = dict.fromkeys(_TOO_MANY + _TOO_SLOW + _TOO_MUCH, 0)
        """Connections that were refused or cut."""
        self._by_address: Counter[str] = Counter()
        self._idle: dict[Guest, None] = {}
        self._reserve: dict[Guest, None] = {}

    def enter(self, guest: Guest) -> bool:
        """Counts one more; False where it is one too many and only sits in the reserve."""
        self.count += 1
        self._by_address[guest.address] += 1
        if self._by_address[guest.address] > self.limits.per_address:
            self.cut["address"] += 1
        elif self.count - len(self._reserve) > self.limits.connections and not self._send_off_idle():
            self.cut["full"] += 1
        else:
            return True
        if len(self._reserve) >= _RESERVE:
            oldest = next(iter(self._reserve))
            del self._reserve[oldest]
            oldest.send_off()
        self._reserve[guest] = None
        return False

    def leave(self, guest: Guest) -> None:
        """It is gone."""
        self.count -= 1
        self._by_address[guest.address] -= 1
        if not self._by_address[guest.address]:
            del self._by_address[guest.address]
        self._idle.pop(guest, None)
        self._reserve.pop(guest, None)

    def rest(self, guest: Guest) -> None:
        """It was answered, and is kept for another request."""
        self._idle[guest] = None

    def wake(self, guest: Guest) -> None:
        """It does not idle any more."""
        self._idle.pop(guest, None)

    def _send_off_idle(self) -> bool:
        oldest = next(iter(self._idle), None)
        if oldest is None:
            return False
        self._idle.pop(oldest)
        oldest.send_off()
        return True


def possible_connections(wanted: int) -> int:
    """Raises the soft limit of open files as far as needed and allowed; how many connections that is enough for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _RESERVE + _FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _RESERVE - _FILES))
