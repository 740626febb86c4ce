"""Client of one engine: the requests that it computes or is about to, and how they continue after a crash.

Requests wait in the fair queue of all engines (fair_queue.py) until this engine has capacity for them. It is sent a few
requests more than it runs, so that it need not wait for the event loop when one ends.

A crash is a pause: the client keeps the prompt and the delivered tokens of every open request, and submits them to the
next engine process (supervisor.py). A request is in flight from when it is sent until it ends, and a crash makes all
requests in flight suspects. They are sent to the next engine process one at a time, each only after the previous one is
cleared: it has made two steps of progress (a token after its prompt was read, and one after that) or has ended. So the
next crash has a single new suspect. A request that was in flight in two crashes in a row, without being cleared in
between, is refused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.common.errors import EngineFailed, InvalidRequest
from app.common.ipc import Cancel, Ready, Submit, WorkerConfig
from app.common.types import Counters, PromptScores, Request, RequestStarted, StepReport
from app.engine_client.fair_queue import prompt_tokens
from app.engine_client.supervisor import TOKENS_TO_CLEAR, WORKER, EngineStopped, Supervisor
from app.engine_client.token_stream import TokenSource, TokenStream, notify


def deliver(report: StepReport, streams: Mapping[str, TokenStream], reached: set[TokenStream]) -> list[str]:
    """Adds a report to the streams of its requests, which it adds to `reached`; returns the ids of ended requests.

    This may suspend a stream, which removes its requests from `streams`.
    """
    ended = []
    for request_id, seconds in report.work:
        if stream := streams.get(request_id):
            stream.work_seconds += seconds
    items: list[RequestStarted | PromptScores] = [*report.started, *report.scores]
    for item in items:
        if stream := streams.get(item.request_id):
            stream.push(item.request_id, report.at, item)
            reached.add(stream)
    for event in report.events:
        if stream := streams.get(event.request_id):
            stream.push(event.request_id, report.at, event)
            reached.add(stream)
            if event.finish:
                ended.append(event.request_id)
    for failure in report.failed:
        if stream := streams.get(failure.request_id):
            error = InvalidRequest(failure.message) if failure.is_user_error else EngineFailed(failure.message)
            stream.push(failure.request_id, report.at, error)
            reached.add(stream)
            ended.append(failure.request_id)
    return ended


_log = logging.getLogger("inkstream")
_REFUSED = "the engine crashed twice while it worked on this request, so it is not retried: change the request"

_PREFETCHED_SHARE, _MAX_PREFETCHED = 4, 8
"""Requests that an engine has beyond those that it can run: a quarter as many, at most eight."""
_STEP_PROMPT_TOKENS = 256
"""Prompt tokens that an engine on a CPU starts in one step."""


_MAX_REQUEST_CRASHES = 2

Progress = Callable[[str], int]
"""Progress of a request so far, a monotonic number."""


@dataclass(slots=True)
class _TrackedRequest:
    """One open request of an engine. Owned by CrashRecovery."""

    crash_count: int = 0
    """Consecutive crashes in which it was in flight without being cleared in between."""
    progress_when_sent: int = 0


class CrashRecovery:
    """Tracks the requests of one engine, in the order of sending: in flight, or suspects that wait for their trial."""

    def __init__(self) -> None:
        self._requests: dict[str, _TrackedRequest] = {}
        self._waiting: dict[str, None] = {}
        """Suspects that are to be sent, in order; the values are unused."""
        self._trial: str | None = None

    @property
    def n_suspects(self) -> int:
        """Number of suspects that are not cleared yet."""
        return len(self._waiting) + (self._trial is not None)

    @property
    def n_in_flight(self) -> int:
        """Number of requests that the engine has."""
        return len(self._requests) - len(self._waiting)

    def add(self, request_id: str, progress: int) -> None:
        """Adds a request that is sent now."""
        self._requests[request_id] = _TrackedRequest(progress_when_sent=progress)

    def add_suspect(self, request_id: str, crash_count: int) -> None:
        """Adds a request that was in flight in earlier crashes; pop_next() decides when it is sent."""
        self._requests[request_id] = _TrackedRequest(crash_count=crash_count)
        self._waiting[request_id] = None

    def add_first(self, request_id: str) -> None:
        """Adds a request that is no suspect, but is sent before all suspects and alone."""
        self._requests[request_id] = _TrackedRequest()
        self._waiting = {request_id: None, **self._waiting}

    def crash_count(self, request_id: str) -> int:
        """Consecutive crashes that it was in flight in; for add_suspect() when it is submitted again."""
        return self._requests[request_id].crash_count if request_id in self._requests else 0

    def update_trial(self, progress: Progress) -> None:
        """Ends the trial of a request that is cleared."""
        if self._trial is not None and self._is_cleared(self._trial, progress):
            self._trial = None

    def pop_next(self, progress: Progress) -> str | None:
        """Returns the suspect to send now, whose trial begins; None if there is none, or another's trial goes on."""
        if self._trial is None and self._waiting:
            self._trial = next(iter(self._waiting))
            del self._waiting[self._trial]
            self._requests[self._trial].progress_when_sent = progress(self._trial)
            return self._trial
        return None

    def remove(self, request_id: str) -> None:
        """Removes a request that has ended or was cancelled."""
        self._requests.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if self._trial == request_id:
            self._trial = None

    def on_crash(self, progress: Progress) -> list[str]:
        """Makes all requests suspects; returns those to refuse, which must be removed with remove()."""
        for request_id, request in self._requests.items():
            if request_id not in self._waiting:
                request.crash_count = 1 if self._is_cleared(request_id, progress) else request.crash_count + 1
        self._trial, self._waiting = None, dict.fromkeys(self._requests)
        return [
            request_id for request_id, request in self._requests.items() if request.crash_count >= _MAX_REQUEST_CRASHES
        ]

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


class PoolEvents(TokenSource, Protocol):
    """The engine pool, as its engines see it. `index` is that of the engine."""

    def on_ready(self, index: int) -> None:
        """The engine has loaded; it is abandoned if it differs from the others."""

    def on_capacity(self) -> None:
        """The engine may have capacity for waiting requests."""

    def on_report(self, report: StepReport, ended: Sequence[str]) -> None:
        """The engine has completed a step, after which these requests have ended."""

    def on_crash(self, index: int) -> None:
        """The engine process has exited and will be restarted."""

    def on_stopped(self, index: int, reason: EngineStopped) -> None:
        """The engine will not be restarted."""


class EngineClient:
    """Owns an engine, and the requests that it has been sent or will be sent again after a crash."""

    def __init__(self, config: WorkerConfig, *, silence_seconds: float = 30.0, command: Sequence[str] = WORKER) -> None:
        self.pool: PoolEvents  # set by the pool
        self.counters = Counters()
        self._past_counters = Counters()  # of earlier processes of this engine
        self.replayed = 0
        """Requests that were resubmitted to another engine process after a crash, counted each time."""
        self.max_running = config.max_running
        """Most requests that it runs at once."""
        self._index = config.replica
        self._step_prompt_tokens = config.tokens_per_step or _STEP_PROMPT_TOKENS
        self.supervisor = Supervisor(config, self, silence_seconds=silence_seconds, command=command)
        self._streams: dict[str, TokenStream] = {}  # by request id, in the order of sending
        self._reached: set[TokenStream] = set()  # whose readers do not know yet what has arrived
        self._unstarted: dict[str, Request] = {}  # those that the engine has and has not started
        self._recovery = CrashRecovery()
        self._canary = CanaryRequest()

    @property
    def ready(self) -> Ready | None:
        """Facts about the loaded model; None while the engine does not accept requests."""
        return self.supervisor.ready

    @property
    def load(self) -> int:
        """Number of unfinished requests."""
        return len(self._streams)

    @property
    def requests(self) -> dict[str, TokenStream]:
        """Its unfinished requests by id, in the order of sending."""
        return dict(self._streams)

    @property
    def cumulative_counters(self) -> Counters:
        """Monotonic counters over all its processes: a sum over engines that drops would look like a counter reset."""
        one, two = self._past_counters, self.counters
        preemptions, violations = one.preemptions + two.preemptions, one.block_violations + two.block_violations
        return Counters(preemptions=preemptions, block_violations=violations)

    @property
    def n_suspects(self) -> int:
        """Requests that were in flight in a crash, and are retried one by one."""
        return self._recovery.n_suspects

    @property
    def expects_progress(self) -> bool:
        """Whether the engine has work besides grammars, and so must make progress; for the supervisor."""
        return self._recovery.n_in_flight > len(self._compiling)

    @property
    def is_running_canary(self) -> bool:
        """Whether the engine runs only the canary request; for the supervisor."""
        return self._canary.is_open

    @property
    def can_start(self) -> bool:
        """Whether one more request would probably start at once."""
        return self.load < self.max_running and not self.counters.waiting

    def has(self, stream: TokenStream) -> bool:
        """Whether this engine computes some of the stream's sequences, or will after a crash."""
        return any(request_id in self._streams for request_id in stream.open_ids)

    def has_capacity(self, request: Request) -> bool:
        """Whether the request may be sent now.

        With API keys, the last eighth of the slots and the prefetch are only for tenants that have nothing here,
        and a tenant gets no further ahead than what the engine can start in one step: the requests that the engine
        has not started are in order of arrival, and others' turns must not wait for them. Requests whose grammars are
        being compiled take no capacity from others, since they take no part in the steps.
        """
        if self.ready is None or self.n_suspects:
            return False
        compiling = self._compiling
        taken = compiling if request.grammar else self._streams.keys() - compiling
        if len(taken) >= self.max_running + max(1, min(_MAX_PREFETCHED, self.max_running // _PREFETCHED_SHARE)):
            return False
        namespace = request.cache_namespace
        own = [name for name in taken if self._streams[name].requests[0].cache_namespace == namespace]
        if not (namespace and own):
            return True
        tokens = sum(prompt_tokens(self._unstarted[name]) for name in own if name in self._unstarted)
        return len(taken) < self.max_running - self.max_running // 8 and tokens < self._step_prompt_tokens

    def send(self, stream: TokenStream, request_id: str) -> None:
        """Sends a request for which there is capacity; a suspect is sent once no other one is on trial."""
        self._streams[request_id] = stream
        if stream.crash_count:
            self._recovery.add_suspect(request_id, stream.crash_count)
            self._send_suspects()
        else:
            self._recovery.add(request_id, self._progress(request_id))
            self._submit(request_id)

    def release(self, request_ids: Sequence[str]) -> None:
        """Cancels those of these requests that it has; their streams keep their crash counts."""
        for request_id in request_ids:
            if stream := self._streams.get(request_id):
                stream.crash_count = max(stream.crash_count, self._recovery.crash_count(request_id))
                self.supervisor.send(Cancel(request_id))
        self._remove(request_ids)

    def on_report(self, report: StepReport) -> None:
        """Handles the report of a step; for the supervisor."""
        self.counters = report.counters
        for started in report.started:
            self._unstarted.pop(started.request_id, None)
        is_scheduled = bool(self._reached)
        ended = deliver(report, self._streams, self._reached)
        if self._reached and not is_scheduled:  # once for all sequences, and all reports in the pipe
            asyncio.get_running_loop().call_soon(self._notify_readers)
        self._remove(ended)
        self._send_suspects()
        self.pool.on_report(report, ended)

    def _notify_readers(self) -> None:
        reached, self._reached = self._reached, set()
        notify(reached)

    def on_ready(self) -> None:
        """The engine accepts requests: sends those that were in flight first; for the supervisor."""
        n_open = len(self._streams)
        self.pool.on_ready(self._index)
        if self.ready and n_open:
            _log.warning("%d open requests continue on this engine", n_open)
            self.replayed += n_open
        if self.ready and (canary := self._canary.start(self.ready, self.pool)):
            self._streams[CANARY_ID] = canary
            self._recovery.add_first(CANARY_ID)
        self._send_suspects()
        self.pool.on_capacity()

    def on_crash(self) -> bool:
        """Returns whether a request is refused; all others wait for the next process. For the supervisor."""
        self._past_counters = self.cumulative_counters
        self.counters = Counters()
        self._unstarted.clear()
        self._remove(self._canary.on_crash())
        for stream in dict.fromkeys(self._streams.values()):
            stream.incidents.append((time.monotonic(), "engine crashed"))
        refused = self._recovery.on_crash(self._progress)
        # A stream fails as a whole: all its sequences have the same parameters.
        for stream in {self._streams[request_id] for request_id in refused}:
            _log.error("request %s is refused: the engine crashed twice while it worked on it", stream.requests[0].id)
            stream.fail(EngineFailed(_REFUSED), time.monotonic())
            self._canary.schedule()
        self.pool.on_crash(self._index)
        return bool(refused)

    def on_stopped(self, reason: EngineStopped) -> None:
        """The engine will not be restarted; for the supervisor."""
        self._past_counters = self.cumulative_counters
        self.counters = Counters()
        self._remove(self._canary.on_crash())
        self.pool.on_stopped(self._index, reason)

    @property
    def _compiling(self) -> set[str]:
        """Requests whose grammars the engine compiles or has just compiled."""
        return {request_id for request_id, request in self._unstarted.items() if request.grammar}

    def _send_suspects(self) -> None:
        """Sends the next suspect, if it can start at once: while it waits it could not clear itself."""
        self._recovery.update_trial(self._progress)
        can_start = self._recovery.n_in_flight < self.max_running and not self.counters.waiting
        if self.ready and can_start and (request_id := self._recovery.pop_next(self._progress)):
            self._submit(request_id)

    def _submit(self, request_id: str) -> None:
        self._unstarted[request_id] = request = self._streams[request_id].request(request_id)
        self.supervisor.send(Submit(request))

    def _progress(self, request_id: str) -> int:
        return self._streams[request_id].progress(request_id)

    def _remove(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._recovery.remove(request_id)
            self._streams.pop(request_id, None)
            self._unstarted.pop(request_id, None)
