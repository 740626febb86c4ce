"""Client of one engine: the requests that it computes or is about to, and how they continue after a crash.

Requests wait in the fair queue of all engines (fair_queue.py) until this engine has capacity for them. It is sent a few
requests more than it runs, so that it need not wait for the event loop when one ends.

A crash is a pause: the client keeps the prompt and the delivered tokens of every open request, and submits them to the
next engine process (supervisor.py) in the order that crash_recovery.py decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from app.common.errors import EngineFailed, InvalidRequest
from app.common.ipc import Cancel, Ready, Submit, WorkerConfig
from app.common.types import Counters, PromptScores, Request, RequestStarted, SampledEvent, StepReport
from app.engine_client.crash_recovery import CANARY_ID, CanaryRequest, CrashRecovery
from app.engine_client.fair_queue import prompt_tokens
from app.engine_client.supervisor import WORKER, EngineStopped, PoolEvents, Supervisor
from app.engine_client.token_stream import TokenStream


def deliver(report: StepReport, streams: Mapping[str, TokenStream]) -> list[str]:
    """Delivers a report to the streams of its requests; returns the ids of requests that ended.

    A delivery may suspend a stream, which removes its requests from `streams`.
    """
    ended = []
    for request_id, seconds in report.work:
        if stream := streams.get(request_id):
            stream.work_seconds += seconds
    items: list[RequestStarted | PromptScores | SampledEvent] = [*report.started, *report.scores, *report.events]
    for item in items:
        if stream := streams.get(item.request_id):
            stream.push(item.request_id, report.at, item)
            if isinstance(item, SampledEvent) and item.finish:
                ended.append(item.request_id)
    for failure in report.failed:
        if stream := streams.get(failure.request_id):
            error = InvalidRequest(failure.message) if failure.is_user_error else EngineFailed(failure.message)
            stream.push(failure.request_id, report.at, error)
            ended.append(failure.request_id)
    return ended


_log = logging.getLogger("inkstream")
_REFUSED = "the engine crashed twice while it worked on this request, so it is not retried: change the request"

_PREFETCHED_SHARE, _MAX_PREFETCHED = 4, 8
"""Requests that an engine has beyond those that it can run: a quarter as many, at most eight."""
_STEP_PROMPT_TOKENS = 256
"""Prompt tokens that an engine on a CPU starts in one step."""


class EngineClient:
    """Owns an engine, and the requests that it has been sent or will be sent again after a crash."""

    def __init__(self, config: WorkerConfig, *, silence_seconds: float = 30.0, command: Sequence[str] = WORKER) -> None:
        self.pool_events: PoolEvents  # set by the pool
        self.counters = Counters()
        self._past_counters = Counters()  # of earlier processes of this engine
        self.replayed = 0
        """Requests that were resubmitted to another engine process after a crash, counted each time."""
        self._index, self._max_running = config.replica, config.max_running
        self._step_prompt_tokens = config.tokens_per_step or _STEP_PROMPT_TOKENS
        self.supervisor = Supervisor(config, self, silence_seconds=silence_seconds, command=command)
        self._streams: dict[str, TokenStream] = {}  # by request id, in the order of sending
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
        """Requests that were in flight in a crash, and are retried one by one (app/engine_client/crash_recovery.py)."""
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
        return self.load < self._max_running and not self.counters.waiting

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
        if len(taken) >= self._max_running + max(1, min(_MAX_PREFETCHED, self._max_running // _PREFETCHED_SHARE)):
            return False
        namespace = request.cache_namespace
        own = [name for name in taken if self._streams[name].requests[0].cache_namespace == namespace]
        if not (namespace and own):
            return True
        tokens = sum(prompt_tokens(self._unstarted[name]) for name in own if name in self._unstarted)
        return len(taken) < self._max_running - self._max_running // 8 and tokens < self._step_prompt_tokens

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
        ended = deliver(report, self._streams)
        self._remove(ended)
        self._send_suspects()
        self.pool_events.on_report(report, ended)

    def on_ready(self) -> None:
        """The engine accepts requests: sends those that were in flight first; for the supervisor."""
        n_open = len(self._streams)
        self.pool_events.on_ready(self._index)
        if self.ready and n_open:
            _log.warning("%d open requests continue on this engine", n_open)
            self.replayed += n_open
        if self.ready and (canary := self._canary.start(self.ready, self.pool_events)):
            self._streams[CANARY_ID] = canary
            self._recovery.add_first(CANARY_ID)
        self._send_suspects()
        self.pool_events.on_capacity()

    def on_crash(self) -> bool:
        """Returns whether a request is refused; all others wait for the next process. For the supervisor."""
        self._past_counters = self.cumulative_counters
        self.counters = Counters()
        self._unstarted.clear()
        self._remove(self._canary.on_crash())
        refused = self._recovery.on_crash(self._progress)
        # A stream fails as a whole: all its sequences have the same parameters.
        for stream in {self._streams[request_id] for request_id in refused}:
            _log.error("request %s is refused: the engine crashed twice while it worked on it", stream.requests[0].id)
            stream.fail(EngineFailed(_REFUSED), time.monotonic())
            self._canary.schedule()
        self.pool_events.on_crash(self._index)
        return bool(refused)

    def on_stopped(self, reason: EngineStopped) -> None:
        """The engine will not be restarted; for the supervisor."""
        self._past_counters = self.cumulative_counters
        self.counters = Counters()
        self._remove(self._canary.on_crash())
        self.pool_events.on_stopped(self._index, reason)

    @property
    def _compiling(self) -> set[str]:
        """Requests whose grammars the engine compiles or has just compiled."""
        return {request_id for request_id, request in self._unstarted.items() if request.grammar}

    def _send_suspects(self) -> None:
        """Sends the next suspect, if it can start at once: while it waits it could not clear itself."""
        self._recovery.update_trial(self._progress)
        can_start = self._recovery.n_in_flight < self._max_running and not self.counters.waiting
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
