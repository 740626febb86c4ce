"""Sequences that wait to be admitted, in order. Pure: knows no blocks and no budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as PySequence

from app.common.types import Request, Sequence


class WaitingQueue:
    """Callers (requests of one salt) take turns; among those of one caller, first come, first served.

    Followers let others pass until their leader's prompt is computed. A leader came before its followers, and stands
    before them or runs: nobody waits in a circle. Who had to give way comes back before everybody else.

        turn:  ann [a1 a2 a3]   bob [b1]   cyd [c1 c2]        order: a1 b1 c1 a2 c2 a3
    """

    def __init__(self) -> None:
        self._returned: deque[Sequence] = deque()
        self._lanes: dict[str, deque[Sequence]] = {}
        """By salt; whose turn is next stands first, and nobody is here without waiting."""

    def __len__(self) -> int:
        return len(self._returned) + sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        for lane in self._lanes.values():
            yield from lane

    @property
    def has_namespaces(self) -> bool:
        """Whether requests of keys wait here, which must not hold up those of other keys."""
        return any(self._lanes)

    def append(self, sequence: Sequence) -> None:
        """A newcomer, at the end of its caller's; a caller who did not wait has its turn after all others."""
        self._lanes.setdefault(sequence.request.salt, deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """One that had to give way, at the head."""
        self._returned.appendleft(sequence)

    def candidates(self, may_come: Callable[[str], bool] = lambda _salt: True) -> Iterator[Sequence]:
        """Who may come in, in order. Asked as one goes: whoever is admitted is removed afterwards.

        may_come: whether a caller may have one more now; asked before each of its turns, and not again after a no.
        """
        yield from self._returned
        lanes = {salt: (s for s in lane if not _waits_for_leader(s)) for salt, lane in self._lanes.items()}
        while lanes:
            for salt, lane in list(lanes.items()):
                sequence = next(lane, None) if may_come(salt) else None
                if sequence is None:
                    del lanes[salt]
                else:
                    yield sequence

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """They came in, and their callers had their turns in this order."""
        for sequence in sequences:
            is_turn = sequence not in self._returned
            self.remove([sequence])
            lane = self._lanes.pop(sequence.request.salt, None) if is_turn else None
            if lane:
                self._lanes[sequence.request.salt] = lane

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """They do not wait any more."""
        for sequence in sequences:
            if sequence in self._returned:
                self._returned.remove(sequence)
                continue
            lane = self._lanes[sequence.request.salt]
            lane.remove(sequence)
            if not lane:
                del self._lanes[sequence.request.salt]


def has_place(salt: str, running: PySequence[Sequence], places: int) -> bool:
    """Where callers are told apart, none that runs already takes the last eighth of the places: others come at once."""
    is_last = places - len(running) <= places // 8
    return not (is_last and salt and any(sequence.request.salt == salt for sequence in running))


def leader_of(request: Request, older: Iterable[Sequence]) -> Sequence | None:
    """Never one whose keys and values would be others than the request's own."""
    if request.leader is None:
        return None
    leader = next((sequence for sequence in older if sequence.request.id == request.leader), None)
    same = leader and all(getattr(leader.request, x) == getattr(request, x) for x in ("prompt", "source", "salt"))
    return leader if same else None


def _waits_for_leader(sequence: Sequence) -> bool:
    leader = sequence.living_leader
    return leader is not None and not leader.has_prompt
