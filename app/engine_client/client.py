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
from app.engine_client.supervisor import WORKER, EngineGone, PoolEvents, Supervisor
from app.engine_client.token_stream import TokenStream


def deliver(report: StepReport, streams: Mapping[str, TokenStream]) -> list[str]:
    """Hands everything out, by the ids of the requests; those that ended. A reader who is held leaves meanwhile."""
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
            error = InvalidRequest(failure.message) if failure.is_asked_for else EngineFailed(failure.message)
            stream.push(failure.request_id, report.at, error)
            ended.append(failure.request_id)
    return ended


_log = logging.getLogger("inkstream")
_REFUSED = "the engine crashed twice while it worked on this request, which is not tried again: change the request"
_GONE = "the engine stopped and does not come back: send the request again once the service is started anew"
_ENDING = "the service is shutting down: send it again in a moment"


class EngineClient:
    """Owns an engine, and its open streams. The queue, as the API process sees it, is that of all engines."""

    def __init__(
        self,
        config: WorkerConfig,
        queue: FairQueue,
        *,
        silence_seconds: float = 30.0,
        command: Sequence[str] = WORKER,
    ) -> None:
        self.queue = queue
        self.peers: PoolEvents | None = None
        self.counters = Counters()
        self._past = Counters()  # of the processes before this one
        self.replayed = 0
        """Requests that were resubmitted to another engine process after a crash, counted each time."""
        self.n_holds = 0
        """Times that a stream was suspended because its reader did not keep up."""
        self._place, self._places = config.replica, config.max_running
        self.supervisor = Supervisor(config, self, silence_seconds=silence_seconds, command=command)
        self._streams: dict[str, TokenStream] = {}  # by the ids of their requests
        self._held: dict[str, TokenStream] = {}  # likewise: suspended, not submitted again until their readers catch up
        self._quarantine = CrashRecovery()
        self._probe = CanaryRequest()

    @property
    def ready(self) -> Ready | None:
        """What the engine has loaded; None while there is none that takes requests."""
        return self.supervisor.ready

    @property
    def load(self) -> int:
        """Unfinished sequences, except those of suspended streams."""
        return len(self._streams)

    @property
    def streams(self) -> list[TokenStream]:
        """All that are open, in the order in which they came."""
        return list(dict.fromkeys((*self._streams.values(), *self._held.values())))

    @property
    def lasting(self) -> Counters:
        """Monotonic counters over all its processes: a sum over engines that drops would look like a counter reset."""
        one, two = self._past, self.counters
        preemptions, violations = one.preemptions + two.preemptions, one.block_violations + two.block_violations
        return Counters(preemptions=preemptions, block_violations=violations)

    @property
    def innocent(self) -> list[TokenStream]:
        """Those that no engine knows, and that no crash was the fault of: they may go on elsewhere at any time."""
        return [s for s in self.streams if not s.strikes and (s.is_held or self._quarantine.are_innocent(s.open_ids))]

    @property
    def waiting(self) -> list[TokenStream]:
        """Those of which the engine has begun nothing, in the order in which they came, and no suspects."""
        streams = dict.fromkeys(self._streams.values())
        return [s for s in streams if not s.strikes and self._quarantine.are_queued(s.open_ids)]

    @property
    def n_suspects(self) -> int:
        """Requests that were in flight in a crash, and go on one by one (app/engine_client/crash_recovery.py)."""
        return self._quarantine.n_suspects

    @property
    def owes_progress(self) -> bool:
        """Whether the engine has something to compute; for the supervisor."""
        return self._quarantine.owes_progress

    @property
    def is_probing(self) -> bool:
        """Whether the engine runs only the canary request; for the supervisor."""
        return self._probe.is_open

    def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Queues the sequences of one answer, all or none. Raises NotReady, QueueFull, InvalidRequest."""
        if self.ready is None:
            raise NotReady(f"the model is not ready yet ({self.supervisor.phase}): try again in a moment", 1)
        self.queue.check(requests, time.monotonic())
        stream = TokenStream(requests, self)
        self._enter(stream, requests)
        return stream

    def resume(self, stream: TokenStream) -> None:
        """Queues again what a paused stream has left, also while the engine restarts. Raises NotReady, QueueFull."""
        if self.supervisor.is_gone:
            raise NotReady(_ENDING, 5)
        self.queue.check(stream.open_requests, time.monotonic())
        self._enter(stream, stream.renew())

    def drop(self, request_ids: Sequence[str]) -> None:
        """Cancels requests that their stream no longer needs."""
        self.part_with(request_ids)
        for request_id in request_ids:
            self.queue.leave(request_id)

    def position(self, request_id: str) -> int | None:
        """How many requests wait in front of this one; for its stream."""
        return self.queue.position(request_id)

    def hold(self, stream: TokenStream) -> None:
        """Its reader does not take what waits: the engine has nothing to do with it until go_on(); for the stream."""
        self.n_holds += 1
        self.drop(stream.open_ids)
        self._held.update(dict.fromkeys(stream.open_ids, stream))

    def go_on(self, stream: TokenStream) -> None:
        """Queues again what a held stream has left, which was admitted before; for the stream."""
        for request_id in stream.open_ids:
            self._held.pop(request_id, None)
        self._enter(stream, stream.renew())

    def fail_all(self, error: EngineError) -> None:
        """Ends every open stream with an error."""
        for stream in self.streams:
            self._fail(stream, error)
        self.counters = Counters()

    def on_report(self, report: StepReport) -> None:
        """What a step did; for the supervisor."""
        self.counters = report.counters
        for request_id in report.taken:
            self._quarantine.taken(request_id)
        has_backlog = report.counters.waiting > 0
        self.queue.begin(report.started, report.at, has_backlog=has_backlog, engine=self._place)
        for started in report.started:
            self._quarantine.begun(started.request_id)
        self._forget(ended := deliver(report, self._streams))
        if self._quarantine.is_careful:
            self._send_next()
        if self.peers and (ended or not report.counters.running):
            self.peers.on_room(self._place)

    def on_ready(self) -> None:
        """An engine takes requests: those that are open come first; for the supervisor."""
        n_open = len(self._streams)
        if self.peers:
            self.peers.on_ready(self._place)
        if self.ready and n_open:
            _log.warning("%d open requests go on with this engine", n_open)
            self.replayed += n_open
        if self.ready and (probe := self._probe.begin(self.ready, self)):
            self._streams[CANARY_ID] = probe
            self._quarantine.try_first(CANARY_ID)
        self._send_next()

    def on_crash(self) -> bool:
        """Whether a request is refused because of it; all others wait for the next engine. For the supervisor."""
        self._past = self.lasting
        self.counters = Counters()
        self._forget(self._probe.end())
        refused = self._quarantine.crash(self._progress)
        # A stream fails as one: what it asks for is the same in all its sequences.
        for stream in {self._streams[request_id] for request_id in refused}:
            _log.error("request %s is refused: the engine crashed twice while it worked on it", stream.requests[0].id)
            self._fail(stream, EngineFailed(_REFUSED))
            self._probe.owe()
        if self.peers:
            self.peers.on_crash(self._place)
        return bool(refused)

    def on_gone(self, reason: EngineGone) -> None:
        """No engine comes any more; for the supervisor."""
        self._forget(self._probe.end())
        if self.peers:
            self.peers.on_gone(self._place, reason)
        self.fail_all(EngineFailed(_GONE) if reason.exit_code else NotReady(_ENDING, 5))

    def has_room(self, count: int, salt: str) -> bool:
        """Whether `count` more requests of one tenant would start at once; no tenant gets the last eighth of slots."""
        is_calm = self.ready is not None and not self.n_suspects and not self.counters.waiting
        return is_calm and self.load + count <= self._places - (self._places // 8 if salt else 0)

    def part_with(self, request_ids: Sequence[str]) -> None:
        """They go on elsewhere, if at all: their places in the queue stay, and who comes back is no less a suspect."""
        for request_id in request_ids:
            if stream := self._streams.pop(request_id, None):
                stream.strikes = max(stream.strikes, self._quarantine.strikes(request_id))
            self._quarantine.leave(request_id)
            self._held.pop(request_id, None)
            self.supervisor.send(Cancel(request_id))

    def adopt(self, stream: TokenStream) -> None:
        """Goes on with a stream that another engine has parted with; nothing of it is on its way from there."""
        stream.source = self
        if stream.is_held:
            self._held.update(dict.fromkeys(stream.open_ids, stream))
        else:
            self._enter(stream, [stream.request(request_id) for request_id in stream.open_ids])

    def _enter(self, stream: TokenStream, requests: Sequence[Request]) -> None:
        for request in requests:
            self._streams[request.id] = stream
            self.queue.join(request)
            self._quarantine.hold(request.id, request.leader, stream.strikes)
        self._send_next()

    def _send_next(self) -> None:
        """Sends the requests that may be sent now."""
        if self.ready is None:
            return
        self._quarantine.look(self._progress)
        while request_id := self._quarantine.next(self._progress):
            self.supervisor.send(Submit(self._streams[request_id].request(request_id)))

    def _progress(self, request_id: str) -> int:
        return self._streams[request_id].progress(request_id)

    def _fail(self, stream: TokenStream, error: EngineError) -> None:
        request_ids = stream.open_ids
        stream.fail(error, time.monotonic())
        self._forget(request_ids)

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.queue.leave(request_id)
            self._quarantine.leave(request_id)
            self._streams.pop(request_id, None)
            self._held.pop(request_id, None)
