"""Shares of owners in a store of limited size: beyond the limit, the owner with the most entries loses one of them.

This is longest queue drop (Suter, Lakshman, Stiliadis and Choudhury, IEEE INFOCOM 1998), for entries that the store may
drop. Unlike the dynamic threshold in app/common/fair_turns.py, it lets a lone owner fill the store. When a second owner
fills it, too, both keep half of the store, no matter which of them added entries first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, KeysView
from typing import Generic, TypeVar

_Owner = TypeVar("_Owner", bound=Hashable)
_Name = TypeVar("_Name", bound=Hashable)


class EntryCounts(Generic[_Owner]):
    """Entries by owner, and which owner has the most; every operation takes constant time."""

    def __init__(self) -> None:
        self._counts: dict[_Owner, int] = {}
        self._owners: dict[int, OrderedDict[_Owner, None]] = {}
        """By number of entries, the owner first that has had as many for longest; the values are unused."""
        self._most = 0

    @property
    def largest(self) -> _Owner | None:
        """The owner with the most entries, on a tie the one whose number did not change for longest; None if empty."""
        return next(iter(self._owners[self._most])) if self._most else None

    def add(self, owner: _Owner) -> None:
        """Counts an entry of the owner."""
        self._move(owner, self._counts.get(owner, 0), 1)

    def remove(self, owner: _Owner) -> None:
        """Counts an entry of the owner less; it must have one."""
        self._move(owner, self._counts[owner], -1)

    def _move(self, owner: _Owner, count: int, change: int) -> None:
        if count:
            del self._owners[count][owner]
            if not self._owners[count]:
                del self._owners[count]
        if count + change:
            self._counts[owner] = count + change
            self._owners.setdefault(count + change, OrderedDict())[owner] = None
        else:
            del self._counts[owner]
        # The owner is where the most can be now, or one below.
        if count + change > self._most or self._most not in self._owners:
            self._most = count + change


class OwnerShares(Generic[_Name]):
    """The names in a store, by owner. An owner that fills the store evicts only its own entries."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._counts = EntryCounts[str]()
        self._names: dict[str, dict[_Name, None]] = {}
        """By owner, in the order of add(); the values are unused."""

    @property
    def is_exceeded(self) -> bool:
        """Whether the store has more entries than the limit."""
        return self._count > self._limit

    @property
    def largest(self) -> KeysView[_Name]:
        """The names of the owner with the most, the oldest first; the store must have some."""
        owner = self._counts.largest
        assert owner is not None
        return self._names[owner].keys()

    def add(self, owner: str, name: _Name) -> None:
        """Adds a name that the store does not have."""
        self._names.setdefault(owner, {})[name] = None
        self._counts.add(owner)
        self._count += 1

    def discard(self, owner: str, name: _Name) -> None:
        """Removes a name, if the store has it."""
        names = self._names.get(owner, {})
        if name in names:
            del names[name]
            self._counts.remove(owner)
            self._count -= 1
            if not names:
                del self._names[owner]
