"""Crash recovery: which requests are suspects, the canary request, and when to stop restarting.

pending --pop_next()--> sent --on_queued()--> queued --on_started()--> started        a crash: all are pending again

A request is in flight if the engine has it, unless it only waits in the engine's queue: it may have caused a crash.
After a crash the requests that were in flight are sent first, each only after the previous one is cleared: it has made
two steps of progress (a token after its prompt was read, and one after that) or has ended. So the next crash has a
single suspect. A request that was in flight in two crashes in a row, without being cleared in between, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from app.common.ipc import Ready
from app.common.types import Request
from app.engine_client.token_stream import TokenSource, TokenStream

MAX_CRASHES, WINDOW_SECONDS = 3, 600.0
MAX_FORGIVEN = 8


class RestartPolicy:
    """Counts consecutive crashes between which no engine delivered anything to a client.

    A request that crashes the engine causes a second crash before it is refused. That second crash is not counted, and
    if the next engine then answers the canary request, neither is the first: bad requests do not end the service, but
    an engine that never works does. So does an engine that answers only canary requests: while no client gets anything,
    eight refused requests in ten minutes are forgiven, the ninth is not.
    """

    def __init__(self) -> None:
        self._crashes: list[float] = []
        self._forgiven: list[float] = []
        self._can_forgive = True
        """Whether an engine has delivered anything since the last forgiven crash."""

    def record(self, now: float, *, delivered: bool, is_refused: bool, canary_answered: bool = False) -> bool:
        """Returns whether to stop restarting. `delivered`: two or more steps since the last crash had tokens or scores.

        is_refused: a request is refused for its second crash. canary_answered: the engine answered the canary request.
        """
        if delivered:
            self._forgiven = []
        self._forgiven = [at for at in self._forgiven if now - at < WINDOW_SECONDS]
        if delivered or (canary_answered and len(self._forgiven) < MAX_FORGIVEN):
            self._crashes, self._can_forgive = [], True
        if is_refused and self._can_forgive:
            self._forgiven.append(now)
            self._can_forgive = False
            return False
        self._crashes = [*self._crashes, now][-MAX_CRASHES:]
        return len(self._crashes) == MAX_CRASHES and now - self._crashes[0] < WINDOW_SECONDS


TOKENS_TO_CLEAR = 2
"""Tokens generated or scored since it was sent. After one alone, no decode step has run yet."""
MAX_REQUEST_CRASHES = 2

Progress = Callable[[str], int]
"""Progress of a request so far, a monotonic number."""


class _Stage(Enum):
    PENDING = auto()
    SENT = auto()
    QUEUED = auto()
    STARTED = auto()


@dataclass(slots=True)
class _TrackedRequest:
    """One open request. Owned by CrashRecovery."""

    stage: _Stage = _Stage.PENDING
    crash_count: int = 0
    """Consecutive crashes in which it was in flight without being cleared in between."""
    progress_when_sent: int = 0
    leader: str | None = None
    """Id of the request whose prompt it shares, and which reports the prompt's scores; always sent before this one."""


class CrashRecovery:
    """Tracks every open request, in order of arrival."""

    def __init__(self) -> None:
        self._requests: dict[str, _TrackedRequest] = {}
        self._suspects: dict[str, None] = {}  # pending, in order; the values are unused
        self._others: dict[str, None] = {}
        self._trial: str | None = None

    @property
    def expects_progress(self) -> bool:
        """Whether the engine has work, and so must make progress."""
        return any(request.stage in (_Stage.QUEUED, _Stage.STARTED) for request in self._requests.values())

    @property
    def n_suspects(self) -> int:
        """Number of suspects that are not cleared yet."""
        return len(self._suspects) + (self._trial is not None)

    @property
    def has_pending(self) -> bool:
        """Whether a request is pending or on trial."""
        return bool(self._suspects or self._others) or self._trial is not None

    def are_unaffected(self, request_ids: Iterable[str]) -> bool:
        """Whether all of these requests are pending only because of other suspects, or because no engine is running."""
        return all(request_id in self._others for request_id in request_ids)

    def are_queued(self, request_ids: Iterable[str]) -> bool:
        """Whether all of these requests wait in the engine's queue and none is a suspect."""
        requests = (self._requests[request_id] for request_id in request_ids)
        return all(request.stage is _Stage.QUEUED and not request.crash_count for request in requests)

    def add(self, request_id: str, leader: str | None = None, crash_count: int = 0) -> None:
        """Adds a request behind all others and behind its leader. With a `crash_count` it is still a suspect."""
        self._requests[request_id] = _TrackedRequest(leader=leader, crash_count=crash_count)
        (self._suspects if crash_count else self._others)[request_id] = None

    def add_first(self, request_id: str) -> None:
        """Adds a request before all others, which wait until it is cleared."""
        self._requests[request_id] = _TrackedRequest()
        self._suspects = {request_id: None, **self._suspects}

    def crash_count(self, request_id: str) -> int:
        """Consecutive crashes that it was in flight in; for add() when it is submitted again under another id."""
        return self._requests[request_id].crash_count if request_id in self._requests else 0

    def pop_next(self, progress: Progress) -> str | None:
        """Returns the request to send now and marks it as sent; None if no request may be sent."""
        if self._trial is not None:
            return None
        pending = self._suspects or self._others
        request_id = next(iter(pending), None)
        if request_id is None:
            return None
        self._trial = request_id if pending is self._suspects else None
        del pending[request_id]
        request = self._requests[request_id]
        request.stage, request.progress_when_sent = _Stage.SENT, progress(request_id)
        return request_id

    def on_queued(self, request_id: str) -> None:
        """The engine has queued the request; unknown ones are ignored."""
        self._set_stage(request_id, _Stage.QUEUED)

    def on_started(self, request_id: str) -> None:
        """The engine computes the request; unknown ones are ignored."""
        self._set_stage(request_id, _Stage.STARTED)

    def remove(self, request_id: str) -> None:
        """Removes a request that has ended or was cancelled."""
        self._requests.pop(request_id, None)
        self._suspects.pop(request_id, None)
        self._others.pop(request_id, None)
        if self._trial == request_id:
            self._trial = None

    def update_trial(self, progress: Progress) -> bool:
        """Ends the trial of a request that is cleared; returns whether the next request may be sent."""
        if self._trial is not None and self._is_cleared(self._trial, progress):
            self._trial = None
        return self._trial is None

    def on_crash(self, progress: Progress) -> list[str]:
        """Makes all requests pending; returns those to refuse, which must be removed with remove()."""
        for request_id, request in self._requests.items():
            if request.stage in (_Stage.SENT, _Stage.STARTED):
                request.crash_count = 1 if self._is_cleared(request_id, progress) else request.crash_count + 1
            request.stage = _Stage.PENDING
        self._trial = None
        leaders = {request.leader for request in self._requests.values() if request.crash_count}
        self._suspects = {
            request_id: None
            for request_id, request in self._requests.items()
            if request.crash_count or request_id in leaders
        }
        self._others = {request_id: None for request_id in self._requests if request_id not in self._suspects}
        return [
            request_id for request_id, request in self._requests.items() if request.crash_count >= MAX_REQUEST_CRASHES
        ]

    def _set_stage(self, request_id: str, stage: _Stage) -> None:
        if request := self._requests.get(request_id):
            request.stage = stage

    def _is_cleared(self, request_id: str, progress: Progress) -> bool:
        return progress(request_id) - self._requests[request_id].progress_when_sent >= TOKENS_TO_CLEAR


# scheduled --an engine is ready--> running --two tokens--> answered        a crash before that: scheduled again
#
# The canary request is sent first and alone. If the engine crashes on it, no client's request is to blame; if it is
# answered, the engine works, even if no client has got a token since: bad requests alone must not end the service.

CANARY_ID = "engine canary"
"""No client's request has this id, since it contains a space."""


class CanaryRequest:
    """Canary request that confirms a restarted engine works. Owned by the client of one engine."""

    def __init__(self) -> None:
        self._is_scheduled = False
        self._stream: TokenStream | None = None

    @property
    def is_open(self) -> bool:
        """Whether the engine runs the canary request, and nothing else."""
        return self._stream is not None and self._stream.is_open

    def schedule(self) -> None:
        """Schedules a canary request, because a request was refused for a crash."""
        self._is_scheduled = True

    def start(self, ready: Ready, source: TokenSource) -> TokenStream | None:
        """Starts the canary on a ready engine; None if none is scheduled."""
        if not self._is_scheduled:
            return None
        request = Request(
            id=CANARY_ID,
            prompt=(ready.start_id or 0,),
            source=(0,) if ready.has_encoder else (),
            max_tokens=min(TOKENS_TO_CLEAR, ready.context - 1),
        )
        self._is_scheduled, self._stream = False, TokenStream([request], source)
        return self._stream

    def on_crash(self) -> list[str]:
        """Schedules an unanswered canary again; returns the ids of requests that were still open."""
        self._is_scheduled |= self.is_open
        open_ids, self._stream = self._stream.open_ids if self._stream else [], None
        return open_ids
