"""Crash recovery: which requests are suspects, the canary request, and when restarting is given up.

held --next()--> sent --taken--> queued --begun--> begun        a crash: all requests are held again

A request is in flight if the engine has it and not merely in its queue: it may have caused a crash. After a crash the
requests that were in flight are sent first, each only after the previous one is cleared: it has made two steps of
progress (a token after its prompt was read, and one after that) or has ended. So the next crash has a single suspect. A
request that was in flight in two crashes in a row, without being cleared in between, is refused.
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
    """Counts consecutive crashes between which no engine delivered anything to a client.

    A request that crashes the engine causes a second crash before it is refused. That second crash is not counted, and
    if the next engine then answers the canary request, neither is the first: bad requests do not end the service, but
    an engine that can do nothing at all does. So does an engine that answers only canary requests: eight refused
    requests in ten minutes are forgiven if no other client got anything, the ninth is not.
    """

    def __init__(self) -> None:
        self._crashes: list[float] = []
        self._pardons: list[float] = []
        self._may_pardon = True
        """Whether an engine has delivered anything since the last pardon."""

    def record(self, now: float, *, delivered: bool, explained: bool, proven: bool = False) -> bool:
        """Whether this crash is one too many. `delivered`: tokens or scores, in more than one step since the last.

        explained: a request is refused for its second crash. proven: the engine answered the canary request.
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
"""Progress of a request so far, a monotonic number."""


class _Stage(Enum):
    HELD = auto()
    SENT = auto()
    QUEUED = auto()
    BEGUN = auto()


@dataclass(slots=True)
class _Case:
    """One open request. Owned by CrashRecovery."""

    stage: _Stage = _Stage.HELD
    strikes: int = 0
    """Crashes in a row that it was in flight in, without proof between them."""
    before: int = 0
    """Its progress when it was sent."""
    leader: str | None = None
    """The request whose prompt it shares, and which alone reports the prompt's scores: always sent before it."""


class CrashRecovery:
    """Tracks every open request, in order of arrival."""

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
        """Number of suspects that are not cleared yet."""
        return len(self._suspects) + (self._trial is not None)

    @property
    def is_careful(self) -> bool:
        """Whether a request is held or on trial."""
        return bool(self._suspects or self._others) or self._trial is not None

    def are_innocent(self, names: Iterable[str]) -> bool:
        """Whether all of them are held only because of other suspects, or because no engine is running."""
        return all(name in self._others for name in names)

    def are_queued(self, names: Iterable[str]) -> bool:
        """Whether all of them wait in the engine's queue and none is a suspect."""
        cases = (self._cases[name] for name in names)
        return all(case.stage is _Stage.QUEUED and not case.strikes for case in cases)

    def hold(self, name: str, leader: str | None = None, strikes: int = 0) -> None:
        """Adds a request behind all others and behind its leader. With `strikes` it is still a suspect."""
        self._cases[name] = _Case(leader=leader, strikes=strikes)
        (self._suspects if strikes else self._others)[name] = None

    def try_first(self, name: str) -> None:
        """Adds a request before all others, which wait until it is cleared."""
        self._cases[name] = _Case()
        self._suspects = {name: None, **self._suspects}

    def strikes(self, name: str) -> int:
        """Consecutive crashes that it was in flight in; for hold() when it is submitted again under another id."""
        return self._cases[name].strikes if name in self._cases else 0

    def next(self, progress: Progress) -> str | None:
        """Returns the request to send now and marks it as sent; None if no request may be sent."""
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
        """The engine has queued it; a request that has left is ignored."""
        self._move(name, _Stage.QUEUED)

    def begun(self, name: str) -> None:
        """The engine computes it; a request that has left is ignored."""
        self._move(name, _Stage.BEGUN)

    def leave(self, name: str) -> None:
        """Forgets a request that has ended or was cancelled."""
        self._cases.pop(name, None)
        self._suspects.pop(name, None)
        self._others.pop(name, None)
        if self._trial == name:
            self._trial = None

    def look(self, progress: Progress) -> bool:
        """Whether the next request may be sent: none is on trial, or the one on trial is cleared."""
        if self._trial is not None and self._has_proof(self._trial, progress):
            self._trial = None
        return self._trial is None

    def crash(self, progress: Progress) -> list[str]:
        """Holds all requests after a crash; returns those to refuse, which the caller must remove with leave()."""
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
# The canary request is sent first and alone. If the engine crashes on it, no client's request is to blame; if it is
# answered, the engine works, even if no client has got a token since: bad requests alone must not end the service.

CANARY_ID = "the probe"
"""No client's request has this id, since it contains a space."""


class CanaryRequest:
    """Canary request that confirms a restarted engine works. Owned by the client of one engine."""

    def __init__(self) -> None:
        self._is_owed = False
        self._stream: TokenStream | None = None

    @property
    def is_open(self) -> bool:
        """Whether the engine runs it, and nothing else."""
        return self._stream is not None and self._stream.is_open

    def owe(self) -> None:
        """A request is blamed for a crash."""
        self._is_owed = True

    def begin(self, ready: Ready, source: TokenSource) -> TokenStream | None:
        """Starts the canary on a ready engine; None if none is owed."""
        if not self._is_owed:
            return None
        request = Request(
            id=CANARY_ID,
            prompt=(ready.start_id or 0,),
            source=(0,) if ready.has_encoder else (),
            max_tokens=min(PROOF, ready.context - 1),
        )
        self._is_owed, self._stream = False, TokenStream([request], source)
        return self._stream

    def end(self) -> list[str]:
        """After a crash; returns the ids that were still open."""
        self._is_owed |= self.is_open
        left, self._stream = self._stream.open_ids if self._stream else [], None
        return left
