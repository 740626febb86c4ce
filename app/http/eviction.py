"""Who may be sent off when another wants in, and who goes first. Knows addresses, no limits, no HTTP.

The address with the most of these connections gives one up, and of two the one that has had so many for longer: a crowd
pushes out its own, and not the one connection of a slow client elsewhere. Every step takes the same time, however many
there are: a flood must not make its own defence dear.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import Protocol


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
