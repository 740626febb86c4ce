"""Shares of owners in a store of limited size: beyond the limit, the owner with the most entries loses one of them."""

from __future__ import annotations

from collections.abc import Hashable, KeysView
from typing import Generic, TypeVar

_Name = TypeVar("_Name", bound=Hashable)


class OwnerShares(Generic[_Name]):
    """The names in a store, by owner. An owner that fills the store evicts only its own entries."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0
        self._names: dict[str, dict[_Name, None]] = {}
        """By owner, in the order of add(); the values are unused."""

    @property
    def is_exceeded(self) -> bool:
        """Whether the store has more entries than the limit."""
        return self._count > self._limit

    @property
    def largest(self) -> KeysView[_Name]:
        """The names of the owner with the most, the oldest first."""
        return max(self._names.values(), key=len).keys()

    def add(self, owner: str, name: _Name) -> None:
        """Adds a name that the store does not have."""
        self._names.setdefault(owner, {})[name] = None
        self._count += 1

    def discard(self, owner: str, name: _Name) -> None:
        """Removes a name, if the store has it."""
        names = self._names.get(owner, {})
        if name in names:
            del names[name]
            self._count -= 1
            if not names:
                del self._names[owner]
