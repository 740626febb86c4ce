"""After an engine crash: which requests are suspects, the canary request, and when restarting is given up.

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

from app.common.ipc import Ready
from app.common.types import Request
from app.engine_client.token_stream import TokenSource, TokenStream

MOST_CRASHES, WINDOW_SECONDS = 3, 600.0
MOST_PARDONS = 8


class RestartPolicy:
    """Counts crashes in a row, between which no engine has delivered anything to anybody.

    A request at whose door a crash can be laid costs a second one before it is refused (crash_recovery.py). That one
    is not counted, and where the next engine then answers our own probe (app/engine_client/crash_recovery.py),
    neither is the one before: bad requests do not end the service, an engine that can do nothing at all does. So does
    one that answers nothing but probes: eight requests in ten minutes are forgiven where nobody else got anything,
    the ninth is not.
    """

    def __init__(self) -> None:
        self._crashes: list[float] = []
        self._pardons: list[float] = []
        self._may_pardon = True
        """Whether an engine has done anything since the last one."""

    def record(self, now: float, *, delivered: bool, explained: bool, proven: bool = False) -> bool:
        """Whether this crash is one too many. `delivered`: tokens or scores, in more than one step since the last.

        explained: a request is refused, since this was its second crash. proven: the engine had answered the probe.
        """
        if delivered:
            self._pardons = []
        self._pardons = [at for at in self._pardons if now - at < WINDOW_SECONDS]
        if delivered or (proven and len(self._pardons) < MOST_PARDONS):
            self._crashes, self._may_pardon = [], True
        if explained and self._may_pardon:
            self._pardons.append(now)
            self._may_pardon = False
            return False
        self._crashes = [*self._crashes, now][-MOST_CRASHES:]
        return len(self._crashes) == MOST_CRASHES and now - self._crashes[0] < WINDOW_SECONDS


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


# owed --an engine is ready--> asked --two tokens--> answered        a crash before that: owed still
#
# It goes first and alone. What crashes with it has no request to blame; what answers it is no engine to give up,
# although nobody else may have had a token since: a service where nothing but bad requests come must not end by them.

NAME = "the probe"
"""No caller's request is called so: there is a space in it."""


class CanaryRequest:
    """Owned by the client of one engine."""

    def __init__(self) -> None:
        self._is_owed = False
        self._stream: TokenStream | None = None

    @property
    def is_open(self) -> bool:
        """Whether the engine has it, and nothing else."""
        return self._stream is not None and self._stream.is_open

    def owe(self) -> None:
        """A request is blamed for a crash."""
        self._is_owed = True

    def begin(self, ready: Ready, source: TokenSource) -> TokenStream | None:
        """For an engine that takes requests; None where it owes nothing."""
        if not self._is_owed:
            return None
        request = Request(
            id=NAME,
            prompt=(ready.start_id or 0,),
            source=(0,) if ready.has_encoder else (),
            max_tokens=min(PROOF, ready.context - 1),
        )
        self._is_owed, self._stream = False, TokenStream([request], source)
        return self._stream

    def end(self) -> list[str]:
        """The engine is gone; what it has left open."""
        self._is_owed |= self.is_open
        left, self._stream = self._stream.open_ids if self._stream else [], None
        return left
