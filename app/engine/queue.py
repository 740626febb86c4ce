"""Sequences that wait to be admitted, in order. Pure: knows no blocks and no budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from app.engine.types import Sequence


class WaitingQueue:
    """First come, first served, but for followers: they let others pass until their leader's prompt is computed.

    A leader came before its followers, and stands before them or runs: nobody waits in a circle.
    """

    def __init__(self) -> None:
        self._sequences: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def append(self, sequence: Sequence) -> None:
        """A newcomer, at the end."""
        self._sequences.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """One that had to give way, at the head."""
        self._sequences.appendleft(sequence)

    def candidates(self) -> Iterator[Sequence]:
        """Who may come in, in order. Asked as one goes: whoever is admitted is removed afterwards."""
        return (s for s in self._sequences if s.living_leader is None or s.living_leader.has_prompt)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """They do not wait any more."""
        for sequence in sequences:
            self._sequences.remove(sequence)
