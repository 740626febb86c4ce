"""The engine process's loop: inbox -> step -> report, until the pipe closes. Knows the pipe, and no torch.

The end of the pipe means that the API process is gone, and this process goes with it.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
import time
from collections.abc import Callable
from typing import NoReturn

from msgspec.structs import replace

from app import logs
from app.engine.door import Door
from app.engine.engine import Engine
from app.engine.frames import Cancel, Down, Fatal, Phase, Submit, Up, WorkerConfig, encode_frame
from app.engine.inbox import Inbox
from app.engine.start import Assembled, StartError
from app.engine.types import Started, StepReport
from app.faults import fault

_log = logging.getLogger("inkstream")

Send = Callable[[Up], None]
Assemble = Callable[[WorkerConfig, Callable[[str], None]], Assembled]


def run(descriptor: int, assemble: Assemble) -> int:
    """Runs an engine until the pipe closes. Exit codes: 0 closed, 1 failed, 2 bad configuration."""
    # systemd signals every process of a service; the API process decides when this one ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe = socket.socket(fileno=descriptor)
    inbox = Inbox(pipe)

    def send(message: Up) -> None:
        pipe.sendall(encode_frame(message))

    try:
        config = _first_frame(inbox)
        logs.set_up(config.log_level, config.log_format)
        assembled = assemble(config, lambda phase: send(Phase(phase)))
        guides = assembled.guides
        send(assembled.ready)
        _serve(
            assembled.engine,
            Door(guides.prepare, guides.forget, lambda: guides.n_prepared, most=config.max_running),
            inbox,
            send,
            config.heartbeat_seconds,
        )
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    except StartError as error:
        send(Fatal(str(error), user_error=True))
        return 2
    except Exception as error:
        _log.critical("the engine cannot go on", exc_info=error)
        send(Fatal(f"{type(error).__name__} in the engine", user_error=False))
        return 1


def _serve(engine: Engine, door: Door, inbox: Inbox, send: Send, heartbeat_seconds: float) -> NoReturn:
    def report(step: StepReport) -> None:
        waiting = step.counters.waiting + door.n_waiting
        send(replace(step, at=time.monotonic(), counters=replace(step.counters, waiting=waiting)))

    def announce(started: tuple[Started, ...]) -> None:
        report(StepReport(started=started, counters=engine.scheduler.counters))

    # What start-up made stays to the end: neither a full collection between two tokens nor the last one has to walk it.
    gc.freeze()
    while True:
        for frame in inbox.receive(0.0 if engine.has_work else door.wait_seconds(heartbeat_seconds)):
            if isinstance(frame, Submit):
                is_guided = frame.request.guide and frame.request.max_tokens
                (door.enter if is_guided else engine.add)(frame.request)
            elif isinstance(frame, Cancel):
                engine.cancel(frame.request_id)
                door.cancel(frame.request_id)
        for request in door.leave():
            engine.add(request)
        if engine.has_work:
            fault("engine.step")
            done = engine.step(announce)
            report(done)
            door.settle(done)
        else:
            report(StepReport(counters=engine.scheduler.counters))


def _first_frame(inbox: Inbox) -> WorkerConfig:
    frames: list[Down] = []
    while not frames:
        frames = inbox.receive(60.0)
    assert isinstance(frames[0], WorkerConfig), "the first frame tells the configuration"
    return frames[0]
