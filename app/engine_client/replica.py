"""Replica: one engine of the pool, and the requests that it has been sent or will be sent again after a crash."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from app.common.errors import EngineFailed, InvalidRequest
from app.common.ipc import Cancel, Ready, Submit, WorkerConfig
from app.common.types import Counters, Request, StepReport
from app.engine_client.canary import CANARY_ID, ScheduledCanary
from app.engine_client.crash_suspects import CrashSuspects
from app.engine_client.engine_process import WORKER
from app.engine_client.engine_slots import EngineSlots
from app.engine_client.open_sequences import OpenSequences, flush_all
from app.engine_client.supervisor import CrashOutcome, EngineStopped, Supervisor

_log = logging.getLogger("inkstream")
_REFUSED = "the engine crashed twice while it worked on this request, so it is not retried: change the request"
_STEP_PROMPT_TOKENS = 256
"""Prompt tokens that an engine on a CPU starts in one step."""


class PoolListener(Protocol):
    """Receives the events of a replica: EnginePool in engine_pool.py."""

    @property
    def waiting(self) -> Mapping[str, OpenSequences]:
        """Responses in the queue by the ids of their requests that no engine has."""

    had_backlog: bool
    """Whether requests waited at the last report."""

    def on_report(self, report: StepReport, ended: Sequence[str]) -> None:
        """The engine has completed a step that started or ended requests, or while others wait."""

    def on_ready(self, index: int) -> None:
        """The engine has loaded."""

    def on_capacity(self) -> None:
        """The engine may have capacity for waiting requests."""

    def on_crash(self, index: int) -> None:
        """The engine's process has ended."""

    def on_stopped(self, index: int, reason: EngineStopped) -> None:
        """The engine will not be restarted."""


class Replica:
    """Owned by the pool; its supervisor runs the engine process and calls the methods on_*()."""

    def __init__(self, config: WorkerConfig, *, silence_seconds: float = 30.0, command: Sequence[str] = WORKER) -> None:
        self.pool: PoolListener  # set by the pool
        self.counters = Counters()
        self._past_counters = Counters()  # of earlier processes of this engine
        self.replayed = 0
        """Requests that were resubmitted to another engine process after a crash, counted each time."""
        self.max_running = config.max_running
        """Most requests that it runs at once."""
        self._index = config.replica
        self._slots = EngineSlots(config.max_running, config.tokens_per_step or _STEP_PROMPT_TOKENS)
        self.supervisor = Supervisor(config, self, silence_seconds=silence_seconds, command=command)
        self._responses: dict[str, OpenSequences] = {}  # by request id, in the order of sending
        self._reached: set[OpenSequences] = set()  # their readers do not know yet what has arrived
        self._suspects = CrashSuspects()
        self._canary = ScheduledCanary()
        self._has_suspects = False
        """Whether suspects wait or are on trial; a plain attribute, because every report asks."""

    @property
    def ready(self) -> Ready | None:
        """Facts about the loaded model; None while the engine does not accept requests."""
        return self.supervisor.ready

    @property
    def load(self) -> int:
        """Number of unfinished requests."""
        return len(self._responses)

    @property
    def responses(self) -> dict[str, OpenSequences]:
        """The responses of its unfinished requests by request id, in the order of sending."""
        return dict(self._responses)

    @property
    def cumulative_counters(self) -> Counters:
        """Monotonic counters over all its processes: a sum over engines that drops would look like a counter reset."""
        one, two = self._past_counters, self.counters
        return Counters(
            preemptions=one.preemptions + two.preemptions,
            block_violations=one.block_violations + two.block_violations,
            drafted=one.drafted + two.drafted,
            accepted=one.accepted + two.accepted,
        )

    @property
    def n_suspects(self) -> int:
        """Requests that were in flight in a crash, and are retried one by one."""
        return self._suspects.n_suspects

    @property
    def expects_progress(self) -> bool:
        """Whether the engine has work besides grammars, and so must make progress; for the supervisor."""
        return self._suspects.n_in_flight > self._slots.n_compiling

    @property
    def can_start(self) -> bool:
        """Whether one more request would probably start at once."""
        return self.load < self.max_running and not self.counters.waiting

    def has(self, response: OpenSequences) -> bool:
        """Whether this engine computes some of the response's sequences, or will after a crash."""
        return any(request_id in self._responses for request_id in response.open_ids)

    def has_capacity(self, request: Request) -> bool:
        """Whether the request may be sent now."""
        return self.ready is not None and not self.n_suspects and self._slots.has_capacity(request)

    def send(self, response: OpenSequences, request_id: str) -> None:
        """Sends a request for which there is capacity; a suspect is sent once no other one is on trial."""
        self._responses[request_id] = response
        if response.crash_count:
            self._slots.hold(response.request(request_id))
            self._suspects.add_suspect(request_id, response.crash_count)
            self._send_suspects()
        else:
            self._suspects.add(request_id, self._progress(request_id))
            self._submit(request_id)

    def release(self, request_ids: Sequence[str]) -> None:
        """Cancels the given requests that this engine holds; their responses keep their crash counts."""
        for request_id in request_ids:
            if response := self._responses.get(request_id):
                response.crash_count = max(response.crash_count, self._suspects.crash_count(request_id))
                self.supervisor.send(Cancel(request_id))
        self._remove(request_ids)

    def on_report(self, report: StepReport) -> None:
        """Handles the report of a step; for the supervisor."""
        self.counters = report.counters
        for started in report.started:
            self._slots.mark_started(started.request_id)
        is_scheduled = bool(self._reached)
        ended = self._deliver(report)
        if self._reached and not is_scheduled:  # once for all sequences, and all reports in the pipe
            asyncio.get_running_loop().call_soon(self._flush)
        if ended:
            self._remove(ended)
        if self._has_suspects:
            self._send_suspects()
        pool = self.pool
        if ended or report.started or report.counters.waiting or pool.waiting or pool.had_backlog:
            pool.on_report(report, ended)

    def _deliver(self, report: StepReport) -> list[str]:
        """Adds a report to the responses of its requests; returns the ids of ended requests.

        This may suspend a response, which removes its requests from this engine.
        """
        responses, reached, at = self._responses, self._reached, report.at
        ended = []
        for request_id, seconds in report.work:
            if response := responses.get(request_id):
                response.work_seconds += seconds
        for speculated in report.speculated:
            if response := responses.get(speculated.request_id):
                response.drafted_tokens += speculated.drafted
                response.accepted_tokens += speculated.accepted
        for started in report.started:
            if response := responses.get(started.request_id):
                response.add_start(at, started)
                reached.add(response)
        for scores in report.scores:
            if response := responses.get(scores.request_id):
                response.add_scores(scores)
                reached.add(response)
        for event in report.events:
            if response := responses.get(event.request_id):
                response.add_token(event.request_id, at, event)
                reached.add(response)
                if event.finish:
                    ended.append(event.request_id)
        for failure in report.failed:
            if response := responses.get(failure.request_id):
                response.fail(
                    InvalidRequest(failure.message) if failure.is_user_error else EngineFailed(failure.message)
                )
                ended.append(failure.request_id)
        return ended

    def _flush(self) -> None:
        reached, self._reached = self._reached, set()
        flush_all(reached)

    def on_ready(self) -> None:
        """The engine accepts requests: sends those that were in flight first; for the supervisor."""
        n_open = len(self._responses)
        self.pool.on_ready(self._index)
        if self.ready and n_open:
            _log.warning("%d open requests continue on this engine", n_open)
            self.replayed += n_open
        if self.ready and (canary := self._canary.start(self.ready)):
            self._responses[CANARY_ID] = canary
            self._slots.hold(canary.requests[0])
            self._suspects.add_first(CANARY_ID)
        self._send_suspects()
        self.pool.on_capacity()

    def on_crash(self) -> CrashOutcome:
        """All requests but refused ones wait for the next process. For the supervisor."""
        self._past_counters = self.cumulative_counters
        self.counters = Counters()
        self._slots.hold_all()
        canary_steps = self._canary.n_steps
        self._remove(self._canary.on_crash())
        for response in dict.fromkeys(self._responses.values()):
            response.incidents.append((time.monotonic(), "engine crashed"))
        refused = self._suspects.on_crash(self._progress)
        self._has_suspects = True
        # A response fails as a whole: all its sequences have the same parameters.
        for response in {self._responses[request_id] for request_id in refused}:
            _log.error("request %s is refused: the engine crashed twice while it worked on it", response.requests[0].id)
            response.fail(EngineFailed(_REFUSED))
            self._canary.schedule()
        self._remove(refused)
        self.pool.on_crash(self._index)
        return CrashOutcome(bool(refused), canary_steps)

    def on_stopped(self, reason: EngineStopped) -> None:
        """The engine will not be restarted; for the supervisor."""
        self._past_counters = self.cumulative_counters
        self.counters = Counters()
        self._remove(self._canary.on_crash())
        self.pool.on_stopped(self._index, reason)

    def _send_suspects(self) -> None:
        """Sends the next suspect, if it can start at once: while it waits it could not clear itself."""
        self._suspects.update_trial(self._progress)
        can_start = self._suspects.n_in_flight < self.max_running and not self.counters.waiting
        if self.ready and can_start and (request_id := self._suspects.pop_next(self._progress)):
            self._submit(request_id)
        self._has_suspects = self.n_suspects > 0

    def _submit(self, request_id: str) -> None:
        request = self._responses[request_id].request(request_id)
        self._slots.take(request)
        self.supervisor.send(Submit(request))

    def _progress(self, request_id: str) -> int:
        return self._responses[request_id].progress(request_id)

    def _remove(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._suspects.remove(request_id)
            self._responses.pop(request_id, None)
            self._slots.release(request_id)
