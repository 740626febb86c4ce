"""Runs a stage in a subprocess until it ends, crashes, or times out.

An illegal access makes a CUDA context unusable, a hang never ends, and memory that one stage leaks would be missing in
the next. So each stage is forked from this process, which has loaded all Python modules and must never touch the GPU
itself: a CUDA context does not survive a fork. If loading the modules already initializes CUDA, each stage can start as
a fresh process instead, and load them again.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from app.common.operating_system import die_with_parent
from benchmarks.gpu.results import Finding, Record, StageContext, Unsupported, shortened

StartMethod = Literal["fork", "spawn"]
GRACE_SECONDS = 3.0
"""Time after a stage's deadline before it is killed; it should have stopped on its own by then."""
_EXIT_SECONDS = 20.0
"""The exit code may have to wait for a core dump to be written."""


def run_in_subprocess(
    function: str, context: StageContext, record: Record, on_finding: Callable[[], None], log: Path, start: StartMethod
) -> None:
    """Runs a stage's function. Findings are recorded at once, also of a stage that fails later."""
    processes: Any = get_context(start)
    started_at = time.monotonic()
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_stage_main, args=(function, context, sender, log))
    with warnings.catch_warnings():
        # Python 3.12 warns about forks of processes with threads; threads of numeric libraries are idle here.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    assert process.pid

    def receive() -> tuple[str, str]:
        while receiver.poll(max(0.0, context.deadline + GRACE_SECONDS - time.monotonic())):
            try:
                message: dict[str, Any] = json.loads(receiver.recv_bytes())
            except EOFError:
                process.join(_EXIT_SECONDS)
                return "failed", _exit_reason(process.exitcode)
            if "status" in message:
                return message["status"], message["why"]
            record.findings.append(Finding(**message))
            on_finding()
        return "timed out", "killed at the deadline"

    try:
        record.status, record.why = receive()
    finally:
        for kill in (os.killpg, os.kill):  # and every process that it has started
            with suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)
        process.join()
        receiver.close()
        record.seconds = round(time.monotonic() - started_at, 1)


def _stage_main(function: str, context: StageContext, pipe: Connection, log: Path) -> None:
    """Exits without cleanup: a broken CUDA context can hang in it."""
    os.setpgid(0, 0)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for standard in (1, 2):  # everything that is printed goes to the log, also by native code
        os.dup2(descriptor, standard)
    os.write(2, f"\n== {function}\n".encode())
    logging.basicConfig(level=logging.INFO)
    if context.is_blocking:  # CUDA reads it when it starts, and it has not
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, context.seconds_left))  # shows where it hangs before it is killed
    for message in _stage_messages(function, context):
        pipe.send_bytes(json.dumps(message).encode())
    sys.stderr.flush()
    os._exit(0)


def _stage_messages(function: str, context: StageContext) -> Iterator[dict[str, Any]]:
    module, _, name = function.rpartition(".")
    try:
        for finding in getattr(importlib.import_module(module), name)(context):
            yield asdict(finding)
    except Unsupported as error:
        yield {"status": "skipped", "why": str(error)}
    except BaseException as error:  # includes SystemExit, and panics of Rust libraries, which are not Exceptions
        traceback.print_exc()
        yield {"status": "failed", "why": _one_line(error)}
    else:
        yield {"status": "done", "why": ""}


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {shortened(str(error))}".removesuffix(": ")


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}; see the log"
    return f"the process ended with {code}; see the log"
