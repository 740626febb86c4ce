"""Main loop of the engine process: receive, step, report, until the pipe closes.

A closed pipe means that the API process has exited, so this process exits too.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
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
from app.common.types import RequestStarted, StepReport
from app.engine.execution.engine import Engine
from app.engine.gpu.triton_cache import keep_triton_cache
from app.engine.guided.grammar_compile_queue import GrammarCompileQueue
from app.engine.watchdog import HangTrace, heartbeat

if TYPE_CHECKING:  # it needs numpy, which the loop must not wait for
    from app.engine.guided.grammar_tracker import GrammarTracker

_log = logging.getLogger("inkstream")


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
        with heartbeat(lambda: send(StepReport()), config.heartbeat_seconds):
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
