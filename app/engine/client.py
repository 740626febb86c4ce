"""The API process's side of the engine: submit, stream, cancel, watch over, start again. asyncio, no torch.

loading --Ready--> ready --died or silent--> loading ... three times in ten minutes: gone for good
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence

from app.engine.admission import QueueLimits
from app.engine.errors import EngineError, EngineFailed, InvalidRequest, NotReady
from app.engine.frames import Cancel, Fatal, Phase, Ready, Submit, Up, WorkerConfig
from app.engine.process import WORKER, EngineProcess
from app.engine.stream import Stream
from app.engine.types import Counters, PromptScores, Request, Started, StepReport, TokenEvent
from app.engine.waiting_line import WaitingLine

_log = logging.getLogger("inkstream")
_MAX_CRASHES, _CRASH_WINDOW_SECONDS = 3, 600.0


class EngineGone(Exception):
    """The engine does not come back; `exit_code` is what the process should end with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineClient:
    """Owns the engine process, the queue as the API process sees it, and all open streams."""

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
        self.restarts = 0
        self.ready: Ready | None = None
        self.phase = "starting"
        self._config = config
        self._command = command
        self._silence_seconds = silence_seconds
        self._process: EngineProcess | None = None
        self._streams: dict[str, Stream] = {}  # by the ids of their requests
        self._last_frame = 0.0
        self._crashes: deque[float] = deque(maxlen=_MAX_CRASHES)
        self._tasks: list[asyncio.Task[None]] = []
        self._ready_event = asyncio.Event()
        self._gone: EngineGone | None = None
        self._gone_event = asyncio.Event()

    def start(self) -> None:
        """Spawns the engine process; `ready` is set once it has loaded."""
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        """Ends the engine process; open streams end with EngineFailed."""
        self._give_up(EngineGone("the service is shutting down", 0))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.fail_all(NotReady("the service is shutting down: send it again in a moment", 5))

    async def wait_ready(self) -> None:
        """Waits until the engine has loaded."""
        await self._ready_event.wait()

    async def wait_gone(self) -> EngineGone:
        """Waits until the engine is gone for good, if ever."""
        await self._gone_event.wait()
        assert self._gone is not None
        return self._gone

    def submit(self, requests: Sequence[Request]) -> Stream:
        """Queues the sequences of one answer, all or none. Raises NotReady, QueueFull, InvalidRequest."""
        self._check(requests)
        stream = Stream(requests, self._drop, self.queue.position)
        self._send(stream, requests)
        return stream

    def resume(self, stream: Stream) -> None:
        """Queues again what a paused stream has left to do. Raises NotReady, QueueFull."""
        self._check(stream.open_requests)
        self._send(stream, stream.renew())

    def fail_all(self, error: EngineError) -> None:
        """Ends every open stream with an error."""
        for stream in set(self._streams.values()):
            request_ids = stream.open_ids
            stream.fail(error, time.monotonic())
            self._forget(request_ids)
        self.counters = Counters()

    def _check(self, requests: Sequence[Request]) -> None:
        if self.ready is None:
            raise NotReady(f"the model is not ready yet ({self.phase}): try again in a moment", 1)
        self.queue.check(requests, time.monotonic())

    def _send(self, stream: Stream, requests: Sequence[Request]) -> None:
        assert self._process, "there is one while it is ready"
        for request in requests:
            self._streams[request.id] = stream
            self.queue.join(request)
            self._process.send(Submit(request))

    def _drop(self, request_ids: Sequence[str]) -> None:
        self._forget(request_ids)
        if self._process:
            for request_id in request_ids:
                self._process.send(Cancel(request_id))

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.queue.leave(request_id)
            self._streams.pop(request_id, None)

    async def _supervise(self) -> None:
        """One engine process after the other. Whatever ends one is a crash, also that it could not be started."""
        while self._gone is None:
            try:
                await self._live_once()
            except Exception:
                _log.exception("the engine process could not be run")
                await asyncio.sleep(0.1)
            self._record_crash()

    async def _live_once(self) -> None:
        """From the start of an engine process to its end."""
        self._process = process = await EngineProcess.spawn(self._take, self._command)
        self.phase, self._last_frame = "starting", time.monotonic()
        process.send(self._config)
        try:
            await process.gone()
        finally:
            self.ready, self._process = None, None
            self._ready_event.clear()
            code = await process.end()
            if self._gone is None:
                _log.warning("the engine process %d ended with exit code %d", process.pid, code)

    async def _watch(self) -> None:
        """Kills an engine that is ready and silent: it owes a report at least once a heartbeat."""
        pause = min(1.0, self._silence_seconds / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            if now - before > 2 * pause:  # this process stood still itself, so the engine's silence says nothing
                self._last_frame = now
            if self.ready and self._process and now - self._last_frame > self._silence_seconds:
                _log.warning("the engine process %d is silent and is killed", self._process.pid)
                self._process.kill()

    def _record_crash(self) -> None:
        self.fail_all(EngineFailed("the engine stopped while it worked on this request: send it again"))
        self.restarts += 1
        now = time.monotonic()
        self._crashes.append(now)
        if len(self._crashes) == _MAX_CRASHES and now - self._crashes[0] < _CRASH_WINDOW_SECONDS:
            self._give_up(EngineGone(f"the engine stopped {_MAX_CRASHES} times in ten minutes", 1))

    def _give_up(self, reason: EngineGone) -> None:
        if self._gone is None:
            self._gone = reason
            self._gone_event.set()

    def _take(self, frame: Up) -> None:
        self._last_frame = time.monotonic()
        match frame:
            case StepReport():
                self._take_report(frame)
            case Phase():
                self.phase = frame.name
                _log.info("engine: %s", frame.name)
            case Ready():
                self.ready, self.phase = frame, "ready"
                self._ready_event.set()
                _log.info(
                    "ready: %.2f M parameters, %s on %s, context %d, %d cache blocks of %d tokens, numerics %s (%s)",
                    *(frame.n_params / 1e6, frame.dtype, frame.device, frame.context),
                    *(frame.blocks_total, frame.block_size, frame.numerics, frame.numerics_reason),
                )
            case Fatal():
                self.phase = frame.message
                if frame.user_error:
                    self._give_up(EngineGone(frame.message, 2))

    def _take_report(self, report: StepReport) -> None:
        self.counters = report.counters
        self.queue.begin(report.started, report.at, has_backlog=report.counters.waiting > 0)
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
