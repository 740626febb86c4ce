"""Supervisor: starts the engine process, monitors it, kills it when it hangs, and restarts it.

loading --Ready--> ready --exited, silent or stuck--> loading ... after too many crashes (RestartPolicy): stopped

EngineProcess is one such process and its pipe: spawn, send and receive frames, terminate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from app.common.ipc import Down, Fatal, FrameDecoder, Phase, Ready, Up, WorkerConfig, decode_up, encode_frame
from app.common.logs import START
from app.common.model_version import Version
from app.common.operating_system import anonymous_memory
from app.common.startup_timer import PHASES, STARTING, format_phases, phase_seconds
from app.common.types import StepReport
from app.engine_client.memory_kills import MemoryKills

# -P and an explicit path: a folder called app in the working directory must not be imported.
WORKER = (sys.executable, "-P", "-m", "app.engine")
_ROOT = Path(__file__).parents[2]
_GRACE_SECONDS = 1.0


class EngineProcess(asyncio.Protocol):
    """A child process, connected by a socket pair; it exits when the socket is closed.

    Decodes frames in the transport's callback: a reader task would add a loop iteration to every engine step.
    """

    def __init__(self, process: asyncio.subprocess.Process, on_frame: Callable[[Up], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the process has closed its end; raises the error of on_frame, after which no frames are read."""
        self._process = process
        self._on_frame = on_frame
        self._frames = FrameDecoder()
        self._unwritten: list[bytes] = []
        self._transport: Any = None

    @classmethod
    async def spawn(cls, on_frame: Callable[[Up], None], command: Sequence[str] = WORKER) -> EngineProcess:
        """Starts `command` with the descriptor of its end of the pipe as the last argument.

        on_frame: called with each frame, in the event loop iteration that reads it.
        """
        parent_end, child_end = socket.socketpair()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with child_end, contextlib.ExitStack() as on_error:
            on_error.callback(parent_end.close)
            process = await asyncio.create_subprocess_exec(
                *command,
                str(child_end.fileno()),
                pass_fds=[child_end.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl+C on the terminal must only reach the API process
            )
            on_error.pop_all()
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(lambda: cls(process, on_frame), sock=parent_end))[1]

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, frame: Down) -> None:
        """Sends a frame without waiting; frames to a process that has exited are dropped.

        Frames of one iteration of the event loop are written together: uvloop makes a system call for each write.
        """
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write)
        self._unwritten.append(encode_frame(frame))

    def _write(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if unwritten and not self._transport.is_closing():
            self._transport.write(b"".join(unwritten))

    def kill(self) -> None:
        """Kills the process; idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def terminate(self) -> int:
        """Closes the pipe, waits for the process to exit, and kills it if it does not. Returns its exit code."""
        self._write()
        self._transport.close()
        try:
            await asyncio.wait_for(self._process.wait(), _GRACE_SECONDS)
        except TimeoutError:
            self.kill()
        except asyncio.CancelledError:  # cannot wait, but must not leave an orphan
            self.kill()
            raise
        return await self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        try:
            for body in self._frames.feed(data):
                self._on_frame(decode_up(body))
        except Exception as error:  # the event loop would only log it
            if not self.closed.done():
                self.closed.set_exception(error)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the child has exited in any case
        """See asyncio.Protocol."""
        if not self.closed.done():
            self.closed.set_result(None)


def describe_exit(code: int) -> str:
    """Describes how a process ended, by its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class EngineStopped(Exception):
    """An engine is stopped for good; `exit_code` is that of the service if it was the last engine."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


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
"""Tokens of a request, generated or scored since it was sent, that show that it does not crash the engine. After one
alone, no decode step has run yet."""
_log, _start_log = logging.getLogger("inkstream"), logging.getLogger(START)
_OTHER_WEIGHTS = "{}: holds other weights than the engine that ended had: restart the service to serve them"
_STARTING_SILENCE, _LOADING_SILENCE = 180.0, 60.0
"""Minimum timeouts without a report: until the first one (importing torch), and while loading on a busy machine."""

WeightsFiles = Callable[[], Awaitable[Mapping[str, str]]]
"""Waits until an engine may read the weights, and returns their paths (WorkerConfig.files)."""


async def read_directory() -> Mapping[str, str]:
    """The engine reads the current files of the weights directory."""
    return {}


class Listener(Protocol):
    """Receives the engine's events: EngineClient in engine_pool.py, and a listener in tests that only sees the end."""

    @property
    def expects_progress(self) -> bool:
        """Whether the engine has work, and so must make progress."""

    @property
    def is_running_canary(self) -> bool:
        """Whether the engine runs only the canary request."""

    def on_report(self, report: StepReport) -> None:
        """The engine has completed a step."""

    def on_ready(self) -> None:
        """The engine accepts requests."""

    def on_crash(self) -> bool:
        """The engine has crashed. Returns whether a request is refused because of it."""

    def on_stopped(self, reason: EngineStopped) -> None:
        """The engine will not be restarted."""


class Supervisor:
    """Owns the engine process and restarts it."""

    def __init__(
        self, config: WorkerConfig, listener: Listener, *, silence_seconds: float, command: Sequence[str]
    ) -> None:
        # Several heartbeats must fit into the timeout.
        heartbeat = min(config.heartbeat_seconds, silence_seconds / 4)
        self._config = replace(config, heartbeat_seconds=heartbeat, silence_seconds=silence_seconds)
        self._files: WeightsFiles = read_directory
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
        self._client_steps = self._canary_steps = 0
        """Steps of this process that delivered tokens or scores to clients, and to the canary request."""
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

    def start(self, files: WeightsFiles = read_directory) -> None:
        """Spawns the engine process; `ready` is set once it has loaded."""
        self._files = files
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
            config = replace(self._config, files=await self._files())
            # A restarted process reuses the memory of its predecessor, and the other engines have allocated theirs.
            process.send(replace(config, concurrent_loaders=0, reserved_bytes=0) if self._version else config)
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
        is_refused = self._listener.on_crash()
        delivered, canary_answered = self._client_steps >= TOKENS_TO_CLEAR, self._canary_steps >= TOKENS_TO_CLEAR
        self._client_steps = self._canary_steps = 0
        if self._restart_policy.record(
            time.monotonic(), delivered=delivered, is_refused=is_refused, canary_answered=canary_answered
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
                    self._client_steps += not self._listener.is_running_canary
                    self._canary_steps += self._listener.is_running_canary
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
