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
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from app.common.operating_system import die_with_parent
from benchmarks.gpu.results import Finding, Outcome, StageContext, Unsupported

StartMethod = Literal["fork", "spawn"]
GRACE_SECONDS = 3.0
"""Time after a stage's deadline before it is killed; it should have stopped on its own by then."""
_EXIT_SECONDS = 20.0
"""The exit code may have to wait for a core dump to be written."""


def run_in_subprocess(
    module: str, context: StageContext, on_finding: Callable[[Finding], None], log: Path, start: StartMethod = "fork"
) -> Outcome:
    """Runs module.run(context), and calls `on_finding` with each finding at once, also of a stage that fails later."""
    processes: Any = get_context(start)
    started_at = time.monotonic()
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=_stage_main, args=(module, context, sender, log))
    with warnings.catch_warnings():
        # Python 3.12 warns about forks of processes with threads; threads of numeric libraries are idle here.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    sender.close()
    assert process.pid
    try:
        status, why = _receive(receiver, context.deadline + GRACE_SECONDS, on_finding)
        if status == "died":
            process.join(_EXIT_SECONDS)
            status, why = "failed", _exit_reason(process.exitcode)
    finally:
        _kill_group(process.pid)  # and every process that it has started
        process.join()
        receiver.close()
    return Outcome(status=status, seconds=round(time.monotonic() - started_at, 1), why=why)


def _receive(pipe: Connection, deadline: float, on_finding: Callable[[Finding], None]) -> tuple[str, str]:
    while pipe.poll(max(0.0, deadline - time.monotonic())):
        try:
            message: dict[str, Any] = json.loads(pipe.recv_bytes())
        except EOFError:
            return "died", ""
        if "status" in message:
            return message["status"], message["why"]
        on_finding(Finding(**message))
    return "timed out", "killed at the deadline"


def _stage_main(module: str, context: StageContext, pipe: Connection, log: Path) -> None:
    """Exits without cleanup: a broken CUDA context can hang in it."""
    os.setpgid(0, 0)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect(log, module)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, context.seconds_left))  # shows where it hangs before it is killed
    for message in _stage_messages(module, context):
        pipe.send_bytes(json.dumps(message).encode())
    sys.stderr.flush()
    os._exit(0)


def _stage_messages(module: str, context: StageContext) -> Iterator[dict[str, Any]]:
    try:
        for finding in importlib.import_module(module).run(context):
            yield asdict(finding)
    except Unsupported as error:
        yield {"status": "skipped", "why": str(error)}
    except BaseException as error:  # includes SystemExit, and panics of Rust libraries, which are not Exceptions
        traceback.print_exc()
        yield {"status": "failed", "why": _one_line(error)}
    else:
        yield {"status": "done", "why": ""}


def _redirect(log: Path, module: str) -> None:
    """Appends everything that is printed, also by native code, to the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.write(2, f"\n== {module}\n".encode())


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was killed by {signal.Signals(-code).name}; see the log"
    return f"the process ended with {code}; see the log"


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
