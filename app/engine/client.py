"""The API process's side of the engine: submit, stream, cancel, and go on after a crash. asyncio, no torch.

A crash is a pause: the prompt and the delivered tokens of every open request are kept here, and go to the next engine
process (supervisor.py) in the order and with the care that quarantine.py tells.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from app.engine.admission import QueueLimits
from app.engine.errors import EngineError, EngineFailed, InvalidRequest, NotReady
from app.engine.frames import Cancel, Ready, Submit, WorkerConfig
from app.engine.process import WORKER
from app.engine.quarantine import Quarantine
from app.engine.stream import Stream
from app.engine.supervisor import EngineGone, Supervisor
from app.engine.types import Counters, PromptScores, Request, Started, StepReport, TokenEvent
from app.engine.waiting_line import WaitingLine

_log = logging.getLogger("inkstream")
_REFUSED = "the engine crashed twice while it worked on this request, which is not tried again: change the request"
_GONE = "the engine stopped and does not come back: send the request again once the service is started anew"
_ENDING = "the service is shutting down: send it again in a moment"


class EngineClient:
    """Owns the queue as the API process sees it, and all open streams."""

    def __init__(
        self,
        config: WorkerConfig,
        limits: QueueLimits,
        *,
        silence_seconds: float = 30.0,
        command: Sequence[str] = WORKER,
    ) -> None:
        self.queue = WaitingLine(limits)
        self.counters = Counters()
        self.replayed = 0
        """Requests that went to another engine process because theirs had crashed, each as often as that happened."""
        self.n_holds = 0
        """Times that a stream was held because its reader took nothing."""
        self._supervisor = Supervisor(config, self, silence_seconds=silence_seconds, command=command)
        self._streams: dict[str, Stream] = {}  # by the ids of their requests
        self._held: dict[str, Stream] = {}  # likewise: the engine does not know them until their readers have read
        self._quarantine = Quarantine()

    @property
    def ready(self) -> Ready | None:
        """What the engine has loaded; None while there is none that takes requests."""
        return self._supervisor.ready

    @property
    def phase(self) -> str:
        """What the engine is doing, for people."""
        return self._supervisor.phase

    @property
    def restarts(self) -> int:
        """Engine processes that ended."""
        return self._supervisor.restarts

    @property
    def report_age(self) -> float:
        """Seconds since the engine was heard of last."""
        return self._supervisor.report_age

    @property
    def progress_age(self) -> float:
        """Seconds since its last step that did anything; 0 where it has nothing to do."""
        return self._supervisor.progress_age

    @property
    def n_suspects(self) -> int:
        """Requests that were in flight in a crash, and go on one by one (quarantine.py)."""
        return self._quarantine.n_suspects

    @property
    def owes_progress(self) -> bool:
        """Whether the engine has something to compute; for the supervisor."""
        return self._quarantine.owes_progress

    def start(self) -> None:
        """Spawns the engine process; `ready` is set once it has loaded."""
        self._supervisor.start()

    async def stop(self) -> None:
        """Ends the engine process; open streams end with NotReady."""
        await self._supervisor.stop()

    async def wait_ready(self) -> None:
        """Waits until the engine has loaded."""
        await self._supervisor.wait_ready()

    async def wait_gone(self) -> EngineGone:
        """Waits until the engine is gone for good, if ever."""
        return await self._supervisor.wait_gone()

    def submit(self, requests: Sequence[Request]) -> Stream:
        """Queues the sequences of one answer, all or none. Raises NotReady, QueueFull, InvalidRequest."""
        if self.ready is None:
            raise NotReady(f"the model is not ready yet ({self.phase}): try again in a moment", 1)
        self.queue.check(requests, time.monotonic())
        stream = Stream(requests, self)
        self._enter(stream, requests)
        return stream

    def resume(self, stream: Stream) -> None:
        """Queues again what a paused stream has left, also while the engine restarts. Raises NotReady, QueueFull."""
        if self._supervisor.is_gone:
            raise NotReady(_ENDING, 5)
        self.queue.check(stream.open_requests, time.monotonic())
        self._enter(stream, stream.renew())

    def drop(self, request_ids: Sequence[str]) -> None:
        """Nobody wants these any more; for their stream."""
        for request_id in request_ids:  # whoever comes back after each crash is no less a suspect
            if stream := self._streams.get(request_id):
                stream.strikes = max(stream.strikes, self._quarantine.strikes(request_id))
        self._forget(request_ids)
        for request_id in request_ids:
            self._supervisor.send(Cancel(request_id))

    def position(self, request_id: str) -> int | None:
        """How many requests wait in front of this one; for its stream."""
        return self.queue.position(request_id)

    def hold(self, stream: Stream) -> None:
        """Its reader does not take what waits: the engine has nothing to do with it until go_on(); for the stream."""
        self.n_holds += 1
        self.drop(stream.open_ids)
        self._held.update(dict.fromkeys(stream.open_ids, stream))

    def go_on(self, stream: Stream) -> None:
        """Queues again what a held stream has left, which was admitted before; for the stream."""
        for request_id in stream.open_ids:
            self._held.pop(request_id, None)
        self._enter(stream, stream.renew())

    def fail_all(self, error: EngineError) -> None:
        """Ends every open stream with an error."""
        for stream in {*self._streams.values(), *self._held.values()}:
            self._fail(stream, error)
        self.counters = Counters()

    def on_report(self, report: StepReport) -> None:
        """What a step did; for the supervisor."""
        self.counters = report.counters
        for request_id in report.taken:
            self._quarantine.taken(request_id)
        self.queue.begin(report.started, report.at, has_backlog=report.counters.waiting > 0)
        for started in report.started:
            self._quarantine.begun(started.request_id)
        items: list[Started | PromptScores | TokenEvent] = [*report.started, *report.scores, *report.events]
        for item in items:
            if stream := self._streams.get(item.request_id):
                stream.push(item.request_id, report.at, item)
                if isinstance(item, TokenEvent) and item.finish:
                    self._forget([item.request_id])
        for failure in report.failed:
            if stream := self._streams.get(failure.request_id):
                error = InvalidRequest(failure.message) if failure.is_asked_for else EngineFailed(failure.message)
                stream.push(failure.request_id, report.at, error)
                self._forget([failure.request_id])
        if self._quarantine.is_careful:
            self._send_next()

    def on_ready(self) -> None:
        """An engine takes requests: those that are open come first; for the supervisor."""
        if self._streams:
            _log.warning("%d open requests go on with this engine", len(self._streams))
            self.replayed += len(self._streams)
        self._send_next()

    def on_crash(self) -> bool:
        """Whether a request is refused because of it; all others wait for the next engine. For the supervisor."""
        self.counters = Counters()
        refused = self._quarantine.crash(self._progress)
        # A stream fails as one: what it asks for is the same in all its sequences.
        for stream in {self._streams[request_id] for request_id in refused}:
            _log.error("request %s is refused: the engine crashed twice while it worked on it", stream.requests[0].id)
            self._fail(stream, EngineFailed(_REFUSED))
        return bool(refused)

    def on_gone(self, reason: EngineGone) -> None:
        """No engine comes any more; for the supervisor."""
        self.fail_all(EngineFailed(_GONE) if reason.exit_code else NotReady(_ENDING, 5))

    def _enter(self, stream: Stream, requests: Sequence[Request]) -> None:
        for request in requests:
            self._streams[request.id] = stream
            self.queue.join(request)
            self._quarantine.hold(request.id, request.leader, stream.strikes)
        self._send_next()

    def _send_next(self) -> None:
        """Sends whoever may go now."""
        if self.ready is None:
            return
        self._quarantine.look(self._progress)
        while request_id := self._quarantine.next(self._progress):
            self._supervisor.send(Submit(self._streams[request_id].request(request_id)))

    def _progress(self, request_id: str) -> int:
        return self._streams[request_id].progress(request_id)

    def _fail(self, stream: Stream, error: EngineError) -> None:
        request_ids = stream.open_ids
        stream.fail(error, time.monotonic())
        self._forget(request_ids)

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.queue.leave(request_id)
            self._quarantine.leave(request_id)
            self._streams.pop(request_id, None)
            self._held.pop(request_id, None)
