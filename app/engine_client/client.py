"""Client of one engine: submit, stream, cancel, and continue after a crash.

A crash is a pause: the client keeps the prompt and the delivered tokens of every open request, and submits them to the
next engine process (supervisor.py) in the order that crash_recovery.py decides. With several engines
(app/engine_client/engine_pool.py), requests that cannot have caused the crash go to another one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from app.common.errors import EngineError, EngineFailed, InvalidRequest, NotReady
from app.common.ipc import Cancel, Ready, Submit, WorkerConfig
from app.common.types import Counters, PromptScores, Request, RequestStarted, SampledEvent, StepReport
from app.engine_client.crash_recovery import CANARY_ID, CanaryRequest, CrashRecovery
from app.engine_client.fair_queue import FairQueue
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
_ENGINE_STOPPED = "the engine stopped and will not be restarted: send the request again after the service is restarted"
_SHUTTING_DOWN = "the service is shutting down: send it again in a moment"


class EngineClient:
    """Owns an engine and its open streams. `queue` is shared by all engines."""

    def __init__(
        self,
        config: WorkerConfig,
        queue: FairQueue,
        *,
        silence_seconds: float = 30.0,
        command: Sequence[str] = WORKER,
    ) -> None:
        self.queue = queue
        self.pool_events: PoolEvents | None = None
        self.counters = Counters()
        self._past_counters = Counters()  # of earlier processes of this engine
        self.replayed = 0
        """Requests that were resubmitted to another engine process after a crash, counted each time."""
        self.n_suspensions = 0
        """Times that a stream was suspended because its reader did not keep up."""
        self._index, self._max_running = config.replica, config.max_running
        self.supervisor = Supervisor(config, self, silence_seconds=silence_seconds, command=command)
        self._streams: dict[str, TokenStream] = {}  # by request id
        self._suspended: dict[str, TokenStream] = {}  # by request id: submitted again once their readers catch up
        self._recovery = CrashRecovery()
        self._canary = CanaryRequest()

    @property
    def ready(self) -> Ready | None:
        """Facts about the loaded model; None while the engine does not accept requests."""
        return self.supervisor.ready

    @property
    def load(self) -> int:
        """Unfinished sequences, except those of suspended streams."""
        return len(self._streams)

    @property
    def streams(self) -> list[TokenStream]:
        """All open streams, in order of arrival."""
        return list(dict.fromkeys((*self._streams.values(), *self._suspended.values())))

    @property
    def cumulative_counters(self) -> Counters:
        """Monotonic counters over all its processes: a sum over engines that drops would look like a counter reset."""
        one, two = self._past_counters, self.counters
        preemptions, violations = one.preemptions + two.preemptions, one.block_violations + two.block_violations
        return Counters(preemptions=preemptions, block_violations=violations)

    @property
    def unaffected(self) -> list[TokenStream]:
        """Streams that no engine process computes and that are no suspects: they may move to another engine."""
        return [
            s
            for s in self.streams
            if not s.crash_count and (s.is_suspended or self._recovery.are_unaffected(s.open_ids))
        ]

    @property
    def waiting(self) -> list[TokenStream]:
        """Streams that only wait in the engine's queue, in order of arrival, without suspects."""
        streams = dict.fromkeys(self._streams.values())
        return [s for s in streams if not s.crash_count and self._recovery.are_queued(s.open_ids)]

    @property
    def n_suspects(self) -> int:
        """Requests that were in flight in a crash, and are retried one by one (app/engine_client/crash_recovery.py)."""
        return self._recovery.n_suspects

    @property
    def expects_progress(self) -> bool:
        """Whether the engine has work, and so must make progress; for the supervisor."""
        return self._recovery.expects_progress

    @property
    def is_running_canary(self) -> bool:
        """Whether the engine runs only the canary request; for the supervisor."""
        return self._canary.is_open

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Queues the sequences of one response, all or none. Raises NotReady, QueueFull, InvalidRequest."""
        if self.ready is None:
            raise NotReady(f"the model is not ready yet ({self.supervisor.phase}): try again in a moment", 1)
        self.queue.check(requests, time.monotonic())
        stream = TokenStream(requests, self)
        self._enqueue(stream, requests)
        return stream

    def resume(self, stream: TokenStream) -> None:
        """Queues a paused stream's open sequences again, even while the engine restarts. Raises NotReady, QueueFull."""
        if self.supervisor.is_stopped:
            raise NotReady(_SHUTTING_DOWN, 5)
        self.queue.check(stream.open_requests, time.monotonic())
        self._enqueue(stream, stream.renew())

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Cancels requests that their stream no longer needs."""
        self.release(request_ids)
        for request_id in request_ids:
            self.queue.remove(request_id)

    def position(self, request_id: str) -> int | None:
        """Number of requests that wait ahead of this one; for its stream."""
        return self.queue.position(request_id)

    def suspend(self, stream: TokenStream) -> None:
        """Cancels the requests of a stream whose reader does not keep up, until resume_suspended(); for the stream."""
        self.n_suspensions += 1
        self.cancel(stream.open_ids)
        self._suspended.update(dict.fromkeys(stream.open_ids, stream))

    def resume_suspended(self, stream: TokenStream) -> None:
        """Queues the open sequences of a suspended stream again, without a second admission check; for the stream."""
        for request_id in stream.open_ids:
            self._suspended.pop(request_id, None)
        self._enqueue(stream, stream.renew())

    def fail_all(self, error: EngineError) -> None:
        """Ends every open stream with an error."""
        for stream in self.streams:
            self._fail(stream, error)
        self.counters = Counters()

    def on_report(self, report: StepReport) -> None:
        """Handles the report of a step; for the supervisor."""
        self.counters = report.counters
        for request_id in report.queued:
            self._recovery.on_queued(request_id)
        has_backlog = report.counters.waiting > 0
        self.queue.on_report(report.started, report.at, has_backlog=has_backlog, engine=self._index)
        for started in report.started:
            self._recovery.on_started(started.request_id)
        self._remove(ended := deliver(report, self._streams))
        if self._recovery.has_pending:
            self._send_next()
        if self.pool_events and (ended or not report.counters.running):
            self.pool_events.on_capacity(self._index)

    def on_ready(self) -> None:
        """The engine accepts requests: sends the open ones first; for the supervisor."""
        n_open = len(self._streams)
        if self.pool_events:
            self.pool_events.on_ready(self._index)
        if self.ready and n_open:
            _log.warning("%d open requests continue on this engine", n_open)
            self.replayed += n_open
        if self.ready and (canary := self._canary.start(self.ready, self)):
            self._streams[CANARY_ID] = canary
            self._recovery.add_first(CANARY_ID)
        self._send_next()

    def on_crash(self) -> bool:
        """Returns whether a request is refused; all others wait for the next process. For the supervisor."""
        self._past_counters = self.cumulative_counters
        self.counters = Counters()
        self._remove(self._canary.on_crash())
        refused = self._recovery.on_crash(self._progress)
        # A stream fails as a whole: all its sequences have the same parameters.
        for stream in {self._streams[request_id] for request_id in refused}:
            _log.error("request %s is refused: the engine crashed twice while it worked on it", stream.requests[0].id)
            self._fail(stream, EngineFailed(_REFUSED))
            self._canary.schedule()
        if self.pool_events:
            self.pool_events.on_crash(self._index)
        return bool(refused)

    def on_stopped(self, reason: EngineStopped) -> None:
        """The engine will not be restarted; for the supervisor."""
        self._remove(self._canary.on_crash())
        if self.pool_events:
            self.pool_events.on_stopped(self._index, reason)
        self.fail_all(EngineFailed(_ENGINE_STOPPED) if reason.exit_code else NotReady(_SHUTTING_DOWN, 5))

    def has_capacity(self, count: int, cache_namespace: str) -> bool:
        """Whether `count` more requests of one tenant would start at once; no tenant gets the last eighth of slots."""
        is_free = self.ready is not None and not self.n_suspects and not self.counters.waiting
        return is_free and self.load + count <= self._max_running - (self._max_running // 8 if cache_namespace else 0)

    def release(self, request_ids: Sequence[str]) -> None:
        """Removes requests from this engine but not from the queue; their streams keep their crash counts."""
        for request_id in request_ids:
            if stream := self._streams.pop(request_id, None):
                stream.crash_count = max(stream.crash_count, self._recovery.crash_count(request_id))
            self._recovery.remove(request_id)
            self._suspended.pop(request_id, None)
            self.supervisor.send(Cancel(request_id))

    def adopt(self, stream: TokenStream) -> None:
        """Continues a stream that another engine has released, and of which that engine will report nothing more."""
        stream.source = self
        if stream.is_suspended:
            self._suspended.update(dict.fromkeys(stream.open_ids, stream))
        else:
            self._enqueue(stream, [stream.request(request_id) for request_id in stream.open_ids])

    def _enqueue(self, stream: TokenStream, requests: Sequence[Request]) -> None:
        for request in requests:
            self._streams[request.id] = stream
            self.queue.add(request)
            self._recovery.add(request.id, request.leader, stream.crash_count)
        self._send_next()

    def _send_next(self) -> None:
        """Sends the requests that may be sent now."""
        if self.ready is None:
            return
        self._recovery.update_trial(self._progress)
        while request_id := self._recovery.pop_next(self._progress):
            self.supervisor.send(Submit(self._streams[request_id].request(request_id)))

    def _progress(self, request_id: str) -> int:
        return self._streams[request_id].progress(request_id)

    def _fail(self, stream: TokenStream, error: EngineError) -> None:
        request_ids = stream.open_ids
        stream.fail(error, time.monotonic())
        self._remove(request_ids)

    def _remove(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.queue.remove(request_id)
            self._recovery.remove(request_id)
            self._streams.pop(request_id, None)
            self._suspended.pop(request_id, None)
