"""Supervisor: starts the engine process, monitors it, kills it when it hangs, and restarts it.

loading --Ready--> ready --exited, silent or stuck--> loading ... after too many crashes (RestartPolicy): stopped
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from app.common.ipc import Down, Fatal, Phase, Ready, Up, WorkerConfig
from app.common.logs import START
from app.common.model_version import Version
from app.common.operating_system import anonymous_memory
from app.common.startup_timer import PHASES, STARTING, format_phases, phase_seconds
from app.common.types import StepReport
from app.engine_client.engine_process import EngineProcess, describe_exit
from app.engine_client.memory_kills import MemoryKills
from app.engine_client.restart_policy import MAX_CRASHES, TOKENS_TO_CLEAR, RestartPolicy
from model.weights_version import WeightsVersion


class EngineStopped(Exception):
    """An engine is stopped for good; the service ends with `exit_code` if it was the last engine."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


_log, _start_log = logging.getLogger("inkstream"), logging.getLogger(START)
_OTHER_WEIGHTS = "{}: holds other weights than the engine that ended had: restart the service to serve them"
_STARTING_SILENCE, _LOADING_SILENCE = 180.0, 60.0
"""Minimum timeouts without a report: until the first one (importing torch), and while loading on a busy machine."""

ReadVersion = Callable[[], Awaitable[WeightsVersion | None]]
"""Waits until an engine may read the weights, and returns their version (WorkerConfig.version)."""


async def read_directory() -> WeightsVersion | None:
    """The engine reads the current files of the weights directory."""
    return None


class CrashOutcome(NamedTuple):
    """What a crash means for the requests of the engine."""

    is_refused: bool
    """Whether a request is refused because of it."""
    canary_steps: int
    """Steps since the last crash that delivered tokens to the canary request, which runs alone."""


class Listener(Protocol):
    """Receives the engine's events: Replica in replica.py, and a listener in tests that only sees the end."""

    @property
    def expects_progress(self) -> bool:
        """Whether the engine has work, and so must make progress."""

    def on_report(self, report: StepReport) -> None:
        """The engine has completed a step."""

    def on_ready(self) -> None:
        """The engine accepts requests."""

    def on_crash(self) -> CrashOutcome:
        """The engine has crashed."""

    def on_stopped(self, reason: EngineStopped) -> None:
        """The engine will not be restarted."""


def _for_restart(config: WorkerConfig, context: int) -> WorkerConfig:
    """A restarted process reuses the memory of its predecessor, and the other engines have allocated theirs.

    context: of the predecessor, which open responses rely on. The files may have been hashed long ago, so it does not
    rely on their hashes.
    """
    version = config.version.with_hashes({}) if config.version else None
    return replace(config, version=version, concurrent_loaders=0, reserved_bytes=0, max_context=context)


class Supervisor:
    """Owns the engine process and restarts it."""

    def __init__(
        self, config: WorkerConfig, listener: Listener, *, silence_seconds: float, command: Sequence[str]
    ) -> None:
        # Several heartbeats must fit into the timeout.
        heartbeat = min(config.heartbeat_seconds, silence_seconds / 4)
        self._config = replace(config, heartbeat_seconds=heartbeat, silence_seconds=silence_seconds)
        self._context = config.max_context
        self._read_version: ReadVersion = read_directory
        self._listener = listener
        self._silence_seconds = silence_seconds
        self._command = command
        self.ready: Ready | None = None
        self.phase = "starting"
        self.restarts = 0
        self.start_seconds: Mapping[str, float] = {}
        """Seconds of each phase of the last completed start."""
        self._version: Version | None = None
        """Of the model that the first process loaded: every restarted process must load the same."""
        self._process: EngineProcess | None = None
        self._kill_reason = ""  # set when this supervisor kills the process
        self._memory_kills = MemoryKills()
        self._lacked_memory = False
        """Whether the kernel killed the last process because memory ran out."""
        self._memory_when_ready = 0
        self._last_frame = time.monotonic()  # or start of the process
        self._has_reported = False
        self._last_progress = time.monotonic()
        self._num_computed = 0
        self._steps = 0
        """Steps of this process that delivered tokens or scores."""
        self._restart_policy = RestartPolicy()
        self._phases: list[tuple[str, float]] = []
        """Phases of the current start, each with the time at which it began."""
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped: EngineStopped | None = None

    @property
    def pid(self) -> int | None:
        """Id of the running engine process; None between two."""
        return self._process.pid if self._process else None

    @property
    def report_age(self) -> float:
        """Seconds since the engine's last frame or its start; it sends at least one frame per heartbeat."""
        return time.monotonic() - self._last_frame

    @property
    def progress_age(self) -> float:
        """Seconds since the last step that made progress; 0 while the engine has no work."""
        return time.monotonic() - self._last_progress if self._listener.expects_progress else 0.0

    @property
    def unwritten_cache_bytes(self) -> int:
        """Memory of a KV cache on the CPU that the engine has reserved and the system has not had to provide yet."""
        if not (self.ready and self._process):
            return 0
        written = anonymous_memory(self._process.pid) - self._memory_when_ready
        return max(0, self.ready.cache_bytes - max(0, written))

    @property
    def is_stopped(self) -> bool:
        """Whether the engine is stopped for good."""
        return self._stopped is not None

    def start(self, version: ReadVersion = read_directory) -> None:
        """Spawns the engine process; `ready` is set once it has loaded."""
        self._read_version = version
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        """Stops the engine process for good."""
        self.give_up(EngineStopped("the service is shutting down", 0))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, frame: Down) -> None:
        """Sends a frame to the running process; dropped if there is none."""
        if self._process:
            self._process.send(frame)

    def give_up(self, reason: EngineStopped) -> None:
        """Stops restarting the engine; only the first reason is kept."""
        if self._stopped is None:
            self._stopped = reason
            self._listener.on_stopped(reason)

    def abandon(self, reason: EngineStopped) -> None:
        """Kills the engine process and gives up."""
        self._set_unready()
        if self._process:
            self._process.kill()
        self.give_up(reason)

    async def _supervise(self) -> None:
        """Runs one engine process after another. Every exit counts as a crash, and so does a failed start."""
        try:
            while self._stopped is None:
                try:
                    await self._run_process()
                except Exception:
                    _log.exception("the engine process could not be run")
                    await asyncio.sleep(0.1)
                self._record_crash()
        except Exception:  # this task is never awaited: unhandled, the error would hang the service
            _log.exception("the engine cannot be restarted")
            self.give_up(EngineStopped("the engine cannot be restarted: see the log for the reason", 1))

    async def _run_process(self) -> None:
        """Runs one engine process from its start to its exit."""
        self._kill_reason, self._last_frame, self._has_reported = "", time.monotonic(), False
        self._phases = [(STARTING, self._last_frame)]
        try:
            self._process = process = await EngineProcess.spawn(self._on_frame, self._command)
        except (FileNotFoundError, PermissionError) as error:  # unlike a lack of memory, these last
            self.give_up(EngineStopped(f"{error.filename or self._command[0]}: cannot be run: {error.strerror}", 2))
            return
        try:
            config = replace(self._config, version=await self._read_version())
            process.send(_for_restart(config, self._context) if self._version else config)
            await process.closed
        finally:
            self._process = None
            self._set_unready()
            code = await process.terminate()
            reason = self._kill_reason or self._memory_kills.explanation(code)
            self._lacked_memory = bool(reason and not self._kill_reason)
            if self._lacked_memory:
                self.phase = "out of memory"
            if self._stopped is None:
                _log.warning("the %s process %d %s%s", self._config.name, process.pid, describe_exit(code), reason)

    async def _watch(self) -> None:
        """Kills an engine that sends no reports, or reports without progress."""
        interval = min(1.0, self._silence_seconds / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(interval)
            self._memory_kills.observe()
            now = time.monotonic()
            was_stalled = now - before > 2 * interval  # this process itself, so the engine's silence means nothing
            if was_stalled or not self._listener.expects_progress:
                self._last_progress = now
            if was_stalled:
                self._last_frame = now
            if self._process and (problem := self._problem()):
                self._kill_reason = f": {problem}"
                self._set_unready()
                self._process.kill()

    def _problem(self) -> str:
        """Why the process must be killed; empty if it is healthy."""
        min_silence = 0.0 if self.ready else _LOADING_SILENCE if self._has_reported else _STARTING_SILENCE
        silence = max(self._silence_seconds, min_silence)
        if self.report_age > silence:
            return f"it was silent for {self.report_age:.1f} s (--engine-silence {self._silence_seconds:g})"
        if self.ready and self.progress_age > silence:
            return f"its steps did nothing for {self.progress_age:.1f} s (--engine-silence {self._silence_seconds:g})"
        return ""

    def _set_unready(self) -> None:
        if self.ready:
            self.phase = "restarting"
        self.ready = None

    def _record_crash(self) -> None:
        if self._stopped:
            return
        self.restarts += 1
        is_refused, canary_steps = self._listener.on_crash()
        n_delivered, self._steps = self._steps - canary_steps, 0
        if self._restart_policy.record(
            time.monotonic(),
            delivered=n_delivered >= TOKENS_TO_CLEAR,
            is_refused=is_refused,
            canary_answered=canary_steps >= TOKENS_TO_CLEAR,
        ):
            problem = f"the engine stopped {MAX_CRASHES} times in ten minutes without delivering anything in between"
            problem += ": out of memory, as the log says" if self._lacked_memory else ""
            self.give_up(EngineStopped(problem, 1))

    def _on_frame(self, frame: Up) -> None:
        self._last_frame, self._has_reported = time.monotonic(), True
        match frame:
            case StepReport():
                if frame.events or frame.scores:
                    self._last_progress = self._last_frame
                    self._steps += 1
                elif frame.failed or frame.num_computed != self._num_computed:
                    self._last_progress = self._last_frame
                self._num_computed = frame.num_computed
                self._listener.on_report(frame)
            case Phase():
                self.phase = frame.name
                if frame.name in PHASES:
                    self._phases.append((frame.name, self._last_frame))
                _start_log.info("%s: %s", self._config.name, frame.name)
            case Ready() if self._version in (None, frame.model_version):
                self._on_ready(frame)
            case Ready():
                self.abandon(EngineStopped(_OTHER_WEIGHTS.format(self._config.weights), 1))
            case Fatal():
                self.phase = frame.message
                if frame.user_error:
                    self.give_up(EngineStopped(frame.message, 2))

    def _on_ready(self, frame: Ready) -> None:
        self.ready, self.phase, self._version = frame, "ready", frame.model_version
        self._context = frame.context
        self._last_progress = time.monotonic()
        self._memory_when_ready = anonymous_memory(self._process.pid) if self._process else 0
        self.start_seconds = phase_seconds(self._phases, self._last_progress)
        log = _log if self.restarts else _start_log
        log.info("%s: started in %s", self._config.name, format_phases(self.start_seconds))
        _start_log.info(
            "%s: %.2f M parameters, %s on %s, context %d, %d cache blocks of %d tokens, numerics %s (%s)",
            "ready" if self._config.replicas == 1 else f"{self._config.name} is ready",
            *(frame.n_params / 1e6, frame.dtype, frame.device, frame.context),
            *(frame.blocks_total, frame.block_size, frame.numerics, frame.numerics_reason),
        )
        self._listener.on_ready()
