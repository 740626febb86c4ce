"""Supervisor: starts the engine process, watches it, kills it when it hangs, and restarts it.

loading --Ready--> ready --ended, silent or stuck--> loading ... one crash too many
(app/engine_client/crash_recovery.py): gone for good

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
from typing import Protocol

from msgspec.structs import replace

from app.common.ipc import Down, Fatal, FrameDecoder, Phase, Ready, Up, WorkerConfig, decode_up, encode_frame
from app.common.startup_timer import StartupTimer, in_words
from app.common.types import StepReport
from app.engine_client.crash_recovery import MOST_CRASHES, PROOF, RestartPolicy

# -P and an explicit path: a folder called app in the working directory must not be imported.
WORKER = (sys.executable, "-P", "-m", "app.engine")
_ROOT = Path(__file__).parents[2]


class EngineProcess:
    """A child whose only links are a socket pair and its exit code; it ends when the pipe does."""

    def __init__(self, process: asyncio.subprocess.Process, transport: asyncio.WriteTransport, pipe: _Pipe) -> None:
        self._process = process
        self._transport = transport
        self._pipe = pipe

    @classmethod
    async def spawn(cls, take: Callable[[Up], None], command: Sequence[str] = WORKER) -> EngineProcess:
        """Starts `command` with the descriptor of its end of the pipe as the last argument.

        take: is given every frame in the turn of the event loop in which it was read.
        """
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                *command,
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl+C on the terminal is for the API process
            )
            undo.pop_all()
        transport, pipe = await asyncio.get_running_loop().create_connection(lambda: _Pipe(take), sock=ours)
        return cls(process, transport, pipe)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def gone(self) -> None:
        """Waits until the process has closed its end. Raises what taking a frame raised: no more are read then."""
        await self._pipe.closed

    def send(self, frame: Down) -> None:
        """Never waits; what is sent to a process that has gone is lost with it."""
        if not self._transport.is_closing():
            self._transport.write(encode_frame(frame))

    def kill(self) -> None:
        """At once; no error where it is gone already."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self, patience_seconds: float = 1.0) -> int:
        """Closes the pipe, waits for the process to follow, kills it where it does not. Returns its exit code."""
        self._transport.close()
        try:
            await asyncio.wait_for(self._process.wait(), patience_seconds)
        except TimeoutError:
            self.kill()
        except asyncio.CancelledError:  # no time to wait, and no orphan either
            self.kill()
            raise
        return await self._process.wait()


def fate(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class _Pipe(asyncio.Protocol):
    """Our end: bytes to frames without a task between them, which would take its turn for every step of the engine."""

    def __init__(self, take: Callable[[Up], None]) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._frames = FrameDecoder()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._take(decode_up(body))
        except Exception as error:  # the event loop would only log it
            self._end(error)
            assert self._transport
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - however it ended, the child is gone
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.closed.done():
            return
        if error:
            self.closed.set_exception(error)
        else:
            self.closed.set_result(None)


class EngineGone(Exception):
    """An engine does not come back; `exit_code` is what the process should end with where there is no other."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PoolEvents(Protocol):
    """Events of one engine for the engine pool. `place` is the index of the engine."""

    def on_ready(self, place: int) -> None:
        """It takes requests."""
        ...

    def on_room(self, place: int) -> None:
        """It has finished requests or is idle: it may have free slots without requests waiting for them."""
        ...

    def on_crash(self, place: int) -> None:
        """Its process has ended and will be restarted."""
        ...

    def on_gone(self, place: int, reason: EngineGone) -> None:
        """It will not be restarted."""
        ...


_log = logging.getLogger("inkstream")
_OTHER_WEIGHTS = "{}: holds other weights than the engine that ended had: start the service again to serve them"
_STARTING_SILENCE, _LOADING_SILENCE = 180.0, 60.0
"""Seconds at least that it may be silent until it has imported torch, and while it loads on a machine that is busy."""

FilesOfWeights = Callable[[], Awaitable[Mapping[str, str]]]
"""Waits until an engine may read the weights, and says from where (WorkerConfig.files)."""


async def as_in_directory() -> Mapping[str, str]:
    """The files that the weights directory holds at that time."""
    return {}


class Listener(Protocol):
    """The owner of the requests in the engine: app/engine_client/client.py."""

    @property
    def owes_progress(self) -> bool:
        """Whether the engine has something to compute."""
        ...

    @property
    def is_probing(self) -> bool:
        """Whether the engine runs only the canary request."""
        ...

    def on_report(self, report: StepReport) -> None:
        """A step was done."""
        ...

    def on_ready(self) -> None:
        """An engine takes requests."""
        ...

    def on_crash(self) -> bool:
        """The engine has crashed. Returns whether a request was blamed for it."""
        ...

    def on_gone(self, reason: EngineGone) -> None:
        """The engine will not be restarted."""
        ...


class Supervisor:
    """Owns the engine process."""

    def __init__(self, config: WorkerConfig, ward: Listener, *, silence_seconds: float, command: Sequence[str]) -> None:
        # It has to speak well before its silence means something.
        heartbeat = min(config.heartbeat_seconds, silence_seconds / 4)
        self._config = replace(config, heartbeat_seconds=heartbeat, silence_seconds=silence_seconds)
        self._files: FilesOfWeights = as_in_directory
        self._ward = ward
        self._silence_seconds = silence_seconds
        self._command = command
        self.ready: Ready | None = None
        self.phase = "starting"
        self.restarts = 0
        self.start_seconds: Mapping[str, float] = {}
        """What the last start that came to its end took, by phase."""
        self._version = ""  # of the weights that all its engines serve, whatever is in their directory later
        self._process: EngineProcess | None = None
        self._why = ""  # we have killed it
        self._last_frame = time.monotonic()  # or when it was started
        self._has_spoken = False
        self._last_progress = time.monotonic()
        self._num_computed = 0
        self._deliveries = self._proofs = 0
        """Steps of this engine that delivered a token or a score to a client, and to the canary request."""
        self._crash_loop = RestartPolicy()
        self._start_clock = StartupTimer(time.monotonic())
        self._tasks: list[asyncio.Task[None]] = []
        self._gone: EngineGone | None = None

    @property
    def report_age(self) -> float:
        """Seconds since the engine was heard of last, or was started; it speaks at least once a heartbeat."""
        return time.monotonic() - self._last_frame

    @property
    def progress_age(self) -> float:
        """Seconds since its last step that did anything; 0 where it has nothing to do."""
        return time.monotonic() - self._last_progress if self._ward.owes_progress else 0.0

    @property
    def is_gone(self) -> bool:
        """Whether it does not come back."""
        return self._gone is not None

    def start(self, files: FilesOfWeights = as_in_directory) -> None:
        """Spawns the engine process; `ready` is set once it has loaded."""
        self._files = files
        self._tasks = [asyncio.create_task(self._supervise()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        """Ends the engine process."""
        self.give_up(EngineGone("the service is shutting down", 0))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, frame: Down) -> None:
        """To the engine there is; lost where there is none."""
        if self._process:
            self._process.send(frame)

    def give_up(self, reason: EngineGone) -> None:
        """No engine is started any more; the first reason counts."""
        if self._gone is None:
            self._gone = reason
            self._ward.on_gone(reason)

    def dismiss(self, reason: EngineGone) -> None:
        """Gives up, and ends the engine that there is."""
        self._set_unready()
        if self._process:
            self._process.kill()
        self.give_up(reason)

    async def _supervise(self) -> None:
        """One engine process after the other. Whatever ends one is a crash, also that it could not be started."""
        try:
            while self._gone is None:
                try:
                    await self._live_once()
                except Exception:
                    _log.exception("the engine process could not be run")
                    await asyncio.sleep(0.1)
                self._record_crash()
        except Exception:  # this task is never awaited: unhandled, the error would hang the service
            _log.exception("the engine cannot be started again")
            self.give_up(EngineGone("the engine cannot be started again: the log says why", 1))

    async def _live_once(self) -> None:
        """From the start of an engine process to its end."""
        self._why, self._last_frame, self._has_spoken = "", time.monotonic(), False
        self._start_clock = StartupTimer(self._last_frame)
        self._process = process = await EngineProcess.spawn(self._take, self._command)
        try:
            config = replace(self._config, files=await self._files())
            # One that comes back takes the memory of the one before: all others have theirs.
            process.send(replace(config, loading_beside=0) if self._version else config)
            await process.gone()
        finally:
            self._process = None
            self._set_unready()
            code = await process.end()
            if self._gone is None:
                _log.warning("the %s process %d %s", self._config.name, process.pid, f"{fate(code)}{self._why}")

    async def _watch(self) -> None:
        """Kills an engine that is silent, or speaks and does nothing."""
        pause = min(1.0, self._silence_seconds / 4)
        while True:
            before = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            stood_still = now - before > 2 * pause  # this process itself, so the engine's silence says nothing
            if stood_still or not self._ward.owes_progress:
                self._last_progress = now
            if stood_still:
                self._last_frame = now
            if self._process and (problem := self._problem()):
                self._why = f": {problem}"
                self._set_unready()
                self._process.kill()

    def _problem(self) -> str:
        """Why it has to be killed; empty where it need not."""
        least = 0.0 if self.ready else _LOADING_SILENCE if self._has_spoken else _STARTING_SILENCE
        silence = max(self._silence_seconds, least)
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
        if self._gone:
            return
        self.restarts += 1
        explained = self._ward.on_crash()
        delivered, proven = self._deliveries >= PROOF, self._proofs >= PROOF
        self._deliveries = self._proofs = 0
        if self._crash_loop.record(time.monotonic(), delivered=delivered, explained=explained, proven=proven):
            problem = f"the engine stopped {MOST_CRASHES} times in ten minutes and did nothing between"
            self.give_up(EngineGone(problem, 1))

    def _take(self, frame: Up) -> None:
        self._last_frame, self._has_spoken = time.monotonic(), True
        match frame:
            case StepReport():
                if frame.events or frame.scores:
                    self._last_progress = self._last_frame
                    self._deliveries += not self._ward.is_probing
                    self._proofs += self._ward.is_probing
                elif frame.failed or frame.num_computed != self._num_computed:
                    self._last_progress = self._last_frame
                self._num_computed = frame.num_computed
                self._ward.on_report(frame)
            case Phase():
                self.phase = frame.name
                self._start_clock.hear(frame.name, self._last_frame)
                _log.info("%s: %s", self._config.name, frame.name)
            case Ready() if self._version in ("", frame.weights_version):
                self._note_ready(frame)
            case Ready():
                self.dismiss(EngineGone(_OTHER_WEIGHTS.format(self._config.weights), 1))
            case Fatal():
                self.phase = frame.message
                if frame.user_error:
                    self.give_up(EngineGone(frame.message, 2))

    def _note_ready(self, frame: Ready) -> None:
        self.ready, self.phase, self._version = frame, "ready", frame.weights_version
        self._last_progress = time.monotonic()
        self.start_seconds = self._start_clock.finish(self._last_progress)
        _log.info("%s: started in %s", self._config.name, in_words(self.start_seconds))
        _log.info(
            "%s: %.2f M parameters, %s on %s, context %d, %d cache blocks of %d tokens, numerics %s (%s)",
            "ready" if self._config.replicas == 1 else f"{self._config.name} is ready",
            *(frame.n_params / 1e6, frame.dtype, frame.device, frame.context),
            *(frame.blocks_total, frame.block_size, frame.numerics, frame.numerics_reason),
        )
        self._ward.on_ready()
