"""Main loop of the engine process: receive, step, report, until the pipe closes.

A closed pipe means that the API process has exited, so this process exits too.

GrammarCompileQueue holds guided requests until their grammars are compiled, so that the steps of others continue.
The watchdog sends heartbeats while the engine loads, and writes stack traces when it hangs.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from app.common import logs
from app.common.fault_injection import fault
from app.common.ipc import Cancel, Down, Fatal, FrameReceiver, Phase, Ready, Submit, Up, WorkerConfig, encode_frame
from app.common.logs import open_nonblocking
from app.common.operating_system import die_with_parent
from app.common.start_signals import ignore_stop_signals
from app.common.types import Request, RequestFailed, RequestStarted, StepReport
from app.engine.cpu.toolchain.library_cache import cache_directory, is_trusted_directory
from app.engine.execution.engine import Engine
from app.engine.guided.grammar_workers import Job
from model.files import reading_from

if TYPE_CHECKING:  # it needs numpy, which the loop must not wait for
    from app.engine.guided.grammar_tracker import GrammarTracker

_log = logging.getLogger("inkstream")
_TRACE_FRACTION = 0.8
"""Fraction of the silence limit after which the stack traces are written, before the process is killed."""


class HangTrace:
    """Dumps the stacks of all threads to a file descriptor (stderr) if alive() is not called for too long.

    The dump does not need the GIL, so it also shows which thread holds it. Resetting the timer starts a thread, so
    alive() does not reset it at every call.
    """

    def __init__(self, silence_seconds: float, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._seconds = silence_seconds * _TRACE_FRACTION
        self._next = 0.0

    def alive(self, now: float) -> None:
        """Resets the timer; may be called any number of times a second."""
        if now >= self._next:
            self._next = now + self._seconds / 4
            faulthandler.dump_traceback_later(self._seconds, file=self._descriptor)


@contextmanager
def heartbeat(send_beat: Callable[[], None], seconds: float) -> Iterator[None]:
    """Calls `send_beat` every `seconds` from a background thread within the block."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(seconds):
            try:
                send_beat()
            except OSError:  # the pipe is closed: the main thread reports that on its next write
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


_NOT_COMPILED = (
    "the guide of this request could not be compiled; the server's log gives the reason under the request's id"
)
_COMPILE_POLL_SECONDS = 0.002


@dataclass(slots=True)
class _GuidedRequest:
    request: Request
    job: Job | None = None
    """None until there is capacity to compile the grammar."""


class GrammarCompileQueue:
    """First come, first served within a cache namespace; namespaces do not wait for one another."""

    def __init__(self, grammars: GrammarTracker, *, max_prepared: int) -> None:
        """At most `max_prepared` compiled grammars are kept for requests that have not started."""
        self._grammars = grammars
        self._max_prepared = max_prepared
        self._queues: dict[str, deque[_GuidedRequest]] = {}
        self._failed: list[RequestFailed] = []
        self._is_used = False
        """Whether a guided request has come: before the first one there is nothing to report or to drop."""

    @property
    def n_waiting(self) -> int:
        """Number of requests in this queue."""
        return sum(map(len, self._queues.values()))

    def wait_seconds(self, otherwise: float) -> float:
        """How long the engine may sleep: only briefly while a grammar is being compiled."""
        return min(otherwise, _COMPILE_POLL_SECONDS) if self._queues else otherwise

    def add(self, request: Request) -> None:
        """Adds a request."""
        self._is_used = True
        self._queues.setdefault(request.cache_namespace, deque()).append(_GuidedRequest(request))
        self._compile()

    def pop_ready(self) -> list[Request]:
        """Removes and returns the requests whose grammars are compiled."""
        if not self._queues:
            return []
        ready = []
        for queue in self._queues.values():
            while queue and queue[0].job and queue[0].job.done:
                request, error = queue[0].request, queue[0].job.error
                queue.popleft()
                if error:
                    _log.error("compiling the grammar of request %s failed", request.id, exc_info=error)
                    self._failed.append(RequestFailed(request.id, _NOT_COMPILED))
                    self._grammars.forget(request.id)
                else:
                    ready.append(request)
        self._compile()
        return ready

    def take_failed(self) -> tuple[RequestFailed, ...]:
        """Returns and resets the requests whose grammars could not be compiled because of an internal error."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def take_work(self) -> tuple[tuple[str, float], ...]:
        """CPU seconds by request, for StepReport.work."""
        return self._grammars.take_work() if self._is_used else ()

    def release_finished(self, report: StepReport) -> None:
        """Drops the grammars of requests that have ended."""
        if not self._is_used:
            return
        for request_id in [e.request_id for e in report.events if e.finish] + [f.request_id for f in report.failed]:
            self._grammars.forget(request_id)

    def cancel(self, request_id: str) -> None:
        """Drops a request and its grammar, if there are any."""
        if not self._is_used:
            return
        for queue in self._queues.values():
            for entry in [entry for entry in queue if entry.request.id == request_id]:
                queue.remove(entry)
        self._grammars.forget(request_id)
        self._compile()

    def _compile(self) -> None:
        """Starts to compile as many grammars as there is capacity for, round robin among namespaces."""
        self._queues = {namespace: queue for namespace, queue in self._queues.items() if queue}
        waiting = {namespace: deque(e for e in queue if not e.job) for namespace, queue in self._queues.items()}
        while any(waiting.values()):
            for namespace, queue in waiting.items():
                if queue and self._grammars.n_prepared >= self._max_prepared - self._reserved(namespace):
                    queue.clear()
                if queue:
                    entry = queue.popleft()
                    entry.job = self._grammars.prepare(entry.request)

    def _reserved(self, namespace: str) -> int:
        """Capacity that a namespace leaves to others: the last eighth, if it already has a grammar here."""
        has_grammar = any(entry.job for entry in self._queues[namespace])
        return self._max_prepared // 8 if namespace and has_grammar else 0


_TRITON_CACHE_VARIABLE = "TRITON_CACHE_DIR"


def keep_triton_cache(cache_dir: Path | None, environment: MutableMapping[str, str]) -> None:
    """Sets Triton's cache directory in `environment`, unless the user has set it. `cache_dir`: --cache-dir.

    Without --cache-dir and without a home directory, Triton uses its default. Where other users can write ours, it uses
    its default in the home directory, or a new temporary one, because it loads the libraries that it finds.
    """
    directory = cache_directory(cache_dir, environment)
    if environment.get(_TRITON_CACHE_VARIABLE) or directory is None:
        return
    folder = directory / "triton"
    for each in (directory, folder):
        if each.exists() and not is_trusted_directory(each):
            _log.warning(
                "%s belongs to another user or is writable by others, and Triton keeps its kernels elsewhere: "
                "run chmod go-w on it, or give another directory with --cache-dir",
                each,
            )
            home = Path(environment.get("HOME") or "/nonexistent")
            if not (os.access(home, os.W_OK) and is_trusted_directory(home)):
                environment[_TRITON_CACHE_VARIABLE] = tempfile.mkdtemp(prefix="inkstream-triton-")
            return
    environment[_TRITON_CACHE_VARIABLE] = str(folder.absolute())


class EngineStartError(ValueError):
    """The configuration does not work; the message says what to change."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready for requests."""

    engine: Engine
    grammars: GrammarTracker
    ready: Ready


_SWITCH_SECONDS = 0.0005
"""Switch interval: how long a grammar thread that runs Python code may keep the GIL from the steps."""

Send = Callable[[Up], None]
BuildEngine = Callable[[WorkerConfig, Callable[[str], None]], BuiltEngine]


def run(descriptor: int, build_engine: BuildEngine) -> int:
    """Runs an engine until the pipe closes. Exit codes: 0 closed, 1 failed, 2 invalid configuration."""
    die_with_parent()
    crash_log = open_nonblocking(2)
    faulthandler.enable(crash_log)  # a crash of native code dumps its stack
    ignore_stop_signals()
    pipe = socket.socket(fileno=descriptor)
    inbox = FrameReceiver(pipe)
    send = _sender(pipe)
    try:
        config = _first_frame(inbox)
        if inbox.is_closed:  # the parent died before die_with_parent() was called
            return 0
        logs.set_up(config.log_level, config.log_format)
        keep_triton_cache(Path(config.cache_dir) if config.cache_dir else None, os.environ)
        files = reading_from(Path(config.weights), config.files)
        with heartbeat(lambda: send(StepReport()), config.heartbeat_seconds), files:
            fault("engine.load")
            built = build_engine(config, lambda phase: send(Phase(phase)))
        send(built.ready)
        sys.setswitchinterval(_SWITCH_SECONDS)
        grammar_queue = GrammarCompileQueue(built.grammars, max_prepared=config.max_running)
        hang_trace = HangTrace(config.silence_seconds, crash_log)
        _WorkerLoop(built.engine, grammar_queue, inbox, send).run(config.heartbeat_seconds, hang_trace)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except EngineStartError as error:
        send(Fatal(str(error), user_error=True))
        return 2
    except Exception as error:
        _log.critical("the engine failed", exc_info=error)
        send(Fatal(f"{type(error).__name__} in the engine", user_error=False))
        return 1
    finally:
        pipe.close()  # tells the API process at once, even if torch hangs on a lost device while Python exits


def _sender(pipe: socket.socket) -> Send:
    """Returns a function that writes whole frames to the pipe; while the engine loads, two threads send."""
    lock = Lock()

    def send(message: Up) -> None:
        frame = encode_frame(message)
        with lock:
            pipe.sendall(frame)

    return send


class _WorkerLoop:
    """Repeats: receive frames, run a step, send a report."""

    def __init__(self, engine: Engine, grammar_queue: GrammarCompileQueue, inbox: FrameReceiver, send: Send) -> None:
        self._engine = engine
        self._grammar_queue = grammar_queue
        self._inbox = inbox
        self._send = send

    def run(self, heartbeat_seconds: float, hang_trace: HangTrace) -> NoReturn:
        """Runs until the pipe closes, which raises EOFError."""
        # Objects from startup live forever: freeze them, so that garbage collections between tokens skip them.
        gc.freeze()
        engine, grammar_queue = self._engine, self._grammar_queue
        while True:
            hang_trace.alive(time.monotonic())
            self._receive(
                self._inbox.receive(0.0 if engine.has_work else grammar_queue.wait_seconds(heartbeat_seconds))
            )
            if failed := grammar_queue.take_failed():
                self._report(StepReport(failed=failed, counters=engine.scheduler.counters))
            if not engine.has_work:
                engine.check_blocks()
                self._report(StepReport(counters=engine.scheduler.counters))
                continue
            fault("engine.step", engine.scheduler.running)
            report = engine.step(self._announce)
            self._report(report)
            grammar_queue.release_finished(report)

    def _receive(self, frames: list[Down]) -> None:
        for frame in frames:
            if isinstance(frame, Submit):
                request = frame.request
                fault("engine.submit", request)
                if request.grammar and request.max_tokens:
                    self._grammar_queue.add(request)
                else:
                    self._engine.add(request)
            elif isinstance(frame, Cancel):
                self._engine.cancel(frame.request_id)
                self._grammar_queue.cancel(frame.request_id)
        for request in self._grammar_queue.pop_ready():
            self._engine.add(request)

    def _announce(self, started: tuple[RequestStarted, ...]) -> None:
        self._report(StepReport(started=started, counters=self._engine.scheduler.counters))

    def _report(self, step: StepReport) -> None:
        report = replace(
            step,
            at=time.monotonic(),
            counters=replace(step.counters, waiting=step.counters.waiting + self._grammar_queue.n_waiting),
            num_computed=sum(sequence.num_computed for sequence in self._engine.scheduler.running),
            work=self._grammar_queue.take_work(),
        )
        self._send(report)


def _first_frame(inbox: FrameReceiver) -> WorkerConfig:
    frames: list[Down] = []
    while not frames:
        frames = inbox.receive(60.0)
    assert isinstance(frames[0], WorkerConfig), "the first frame must be the configuration"
    return frames[0]
