"""Waiting queue: sequences to be admitted, with a fair order among cache namespaces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as PySequence

from app.common.types import Request, Sequence


class WaitingQueue:
    """Round robin among tenants (requests of one cache namespace); first come, first served within a tenant.

    Followers are skipped until their leader's prompt is computed. A leader arrives before its followers and is either
    ahead of them or running, so there is no circular wait. Preempted sequences go to the head of the queue.

        turn:  ann [a1 a2 a3]   bob [b1]   cyd [c1 c2]        order: a1 b1 c1 a2 c2 a3
    """

    def __init__(self) -> None:
        self._returned: deque[Sequence] = deque()
        self._lanes: dict[str, deque[Sequence]] = {}
        """By cache namespace, in the order of their turns; a namespace without waiting sequences has no entry."""

    def __len__(self) -> int:
        return len(self._returned) + sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        for lane in self._lanes.values():
            yield from lane

    @property
    def has_namespaces(self) -> bool:
        """Whether requests of API keys wait, which must not delay those of other keys."""
        return any(self._lanes)

    def append(self, sequence: Sequence) -> None:
        """Appends a sequence to its tenant's lane; a tenant without a lane takes its turn after all others."""
        self._lanes.setdefault(sequence.request.salt, deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Returns a preempted sequence to the head of the queue."""
        self._returned.appendleft(sequence)

    def candidates(self, may_come: Callable[[str], bool] = lambda _salt: True) -> Iterator[Sequence]:
        """Sequences to admit, in order. Lazy: the caller admits while iterating and removes the admitted ones after.

        may_come: whether a namespace may admit one more; evaluated before each of its turns until it is False.
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
        """Removes admitted sequences and moves their tenants behind all others, in this order."""
        for sequence in sequences:
            is_turn = sequence not in self._returned
            self.remove([sequence])
            lane = self._lanes.pop(sequence.request.salt, None) if is_turn else None
            if lane:
                self._lanes[sequence.request.salt] = lane

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Removes sequences from the queue."""
        for sequence in sequences:
            if sequence in self._returned:
                self._returned.remove(sequence)
                continue
            lane = self._lanes[sequence.request.salt]
            lane.remove(sequence)
            if not lane:
                del self._lanes[sequence.request.salt]


def has_place(salt: str, running: PySequence[Sequence], places: int) -> bool:
    """With API keys, reserves the last eighth of the slots for tenants that have nothing running."""
    is_last = places - len(running) <= places // 8
    return not (is_last and salt and any(sequence.request.salt == salt for sequence in running))


def leader_of(request: Request, older: Iterable[Sequence]) -> Sequence | None:
    """The leader, if its prompt, source and namespace are equal: else its keys and values would be wrong."""
    if request.leader is None:
        return None
    leader = next((sequence for sequence in older if sequence.request.id == request.leader), None)
    same = leader and all(getattr(leader.request, x) == getattr(request, x) for x in ("prompt", "source", "salt"))
    return leader if same else None


def _waits_for_leader(sequence: Sequence) -> bool:
    leader = sequence.living_leader
    return leader is not None and not leader.has_prompt
