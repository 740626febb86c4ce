"""Who goes to the engine, and when: all at once, but after a crash the suspects one by one. Pure: names and numbers.

held --next()--> sent --taken--> queued --begun--> begun        a crash: everybody is held again

In flight is what the engine holds and has not just put into its queue: a crash may be its fault. After a crash those
that were in flight go first, and each waits until the one before has proven itself: it has made two steps of progress
(a token after its prompt was read, and one after that) or has ended. So the next crash has one suspect without proof.
Whoever was in flight in two crashes in a row without proof between them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

PROOF = 2
"""Tokens written or scored since it was sent. A fault of decoding alone would show after one."""
MOST_STRIKES = 2

Progress = Callable[[str], int]
"""What a request has got so far: a number that grows."""


class _Stage(Enum):
    HELD = auto()
    SENT = auto()
    QUEUED = auto()
    BEGUN = auto()


@dataclass(slots=True)
class _Case:
    """One open request. Owned by Quarantine."""

    stage: _Stage = _Stage.HELD
    strikes: int = 0
    """Crashes in a row that it was in flight in, without proof between them."""
    before: int = 0
    """Its progress when it was sent."""
    leader: str | None = None
    """Whose prompt it shares, and who alone tells the prompt's scores: never sent after it."""


class CrashRecovery:
    """Knows every open request, in the order in which they came."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}
        self._suspects: dict[str, None] = {}  # held, in order; the values mean nothing
        self._others: dict[str, None] = {}
        self._trial: str | None = None

    @property
    def owes_progress(self) -> bool:
        """Whether the engine has something to compute."""
        return any(case.stage in (_Stage.QUEUED, _Stage.BEGUN) for case in self._cases.values())

    @property
    def n_suspects(self) -> int:
        """How many have still to prove themselves."""
        return len(self._suspects) + (self._trial is not None)

    @property
    def is_careful(self) -> bool:
        """Whether somebody is held, or on trial."""
        return bool(self._suspects or self._others) or self._trial is not None

    def are_innocent(self, names: Iterable[str]) -> bool:
        """Whether all of them are held, and only because others are suspects or there is no engine."""
        return all(name in self._others for name in names)

    def are_queued(self, names: Iterable[str]) -> bool:
        """Whether the engine has all of them in its queue, and no crash was the fault of any."""
        cases = (self._cases[name] for name in names)
        return all(case.stage is _Stage.QUEUED and not case.strikes for case in cases)

    def hold(self, name: str, leader: str | None = None, strikes: int = 0) -> None:
        """A newcomer, behind all others; behind its leader, if it has one. With `strikes` it is a suspect still."""
        self._cases[name] = _Case(leader=leader, strikes=strikes)
        (self._suspects if strikes else self._others)[name] = None

    def try_first(self, name: str) -> None:
        """A newcomer before all others, who wait until it has proven itself."""
        self._cases[name] = _Case()
        self._suspects = {name: None, **self._suspects}

    def strikes(self, name: str) -> int:
        """How many crashes in a row it was in flight in; what hold() is told when it comes again by another name."""
        return self._cases[name].strikes if name in self._cases else 0

    def next(self, progress: Progress) -> str | None:
        """Who is to be sent now, and counts as sent; None where nobody may go."""
        if self._trial is not None:
            return None
        held = self._suspects or self._others
        name = next(iter(held), None)
        if name is None:
            return None
        self._trial = name if held is self._suspects else None
        del held[name]
        self._cases[name].stage, self._cases[name].before = _Stage.SENT, progress(name)
        return name

    def taken(self, name: str) -> None:
        """The engine has put it into its queue; no error for one that has left."""
        self._move(name, _Stage.QUEUED)

    def begun(self, name: str) -> None:
        """The engine computes it; no error for one that has left."""
        self._move(name, _Stage.BEGUN)

    def leave(self, name: str) -> None:
        """It has ended, or nobody wants it any more."""
        self._cases.pop(name, None)
        self._suspects.pop(name, None)
        self._others.pop(name, None)
        if self._trial == name:
            self._trial = None

    def look(self, progress: Progress) -> bool:
        """Whether the next one may go: nobody is on trial, or whoever is has proven itself."""
        if self._trial is not None and self._has_proof(self._trial, progress):
            self._trial = None
        return self._trial is None

    def crash(self, progress: Progress) -> list[str]:
        """The engine is gone: everybody is held, but for those to be refused, who are named and must leave."""
        for name, case in self._cases.items():
            if case.stage in (_Stage.SENT, _Stage.BEGUN):
                case.strikes = 1 if self._has_proof(name, progress) else case.strikes + 1
            case.stage = _Stage.HELD
        self._trial = None
        leaders = {case.leader for case in self._cases.values() if case.strikes}
        self._suspects = {name: None for name, case in self._cases.items() if case.strikes or name in leaders}
        self._others = {name: None for name in self._cases if name not in self._suspects}
        return [name for name, case in self._cases.items() if case.strikes >= MOST_STRIKES]

    def _move(self, name: str, stage: _Stage) -> None:
        if case := self._cases.get(name):
            case.stage = stage

    def _has_proof(self, name: str, progress: Progress) -> bool:
        return progress(name) - self._cases[name].before >= PROOF
