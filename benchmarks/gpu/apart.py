"""Runs a stage in a subprocess until it ends, crashes, or times out.

An illegal access spoils a CUDA context for good, a hang never ends, and what one stage does not give back would be
missing in the next. So each stage is forked off this process, which has loaded Python's side of everything and must
never touch the GPU itself: a context does not survive a fork. Should loading alone have done so, each stage can begin
as a fresh process instead, and load all of it again.
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
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from app.common.operating_system import die_with_parent
from benchmarks.gpu.finding import Bench, Finding, Unsupported

Start = Literal["fork", "spawn"]

GRACE_SECONDS = 3.0
"""Grace period after the stage's deadline, by which the stage should have stopped on its own."""

_EXIT_SECONDS = 20.0
"""A core dump may have to be written before there is an exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    status: str
    """done, failed, timed out, skipped."""
    seconds: float
    why: str = ""


def run_apart(module: str, bench: Bench, hear: Callable[[Finding], None], log: Path, start: Start = "fork") -> Outcome:
    """Runs module.run(bench); `hear` is given each finding as it comes, also of a stage that fails later."""
    context: Any = get_context(start)
    began = time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(module, bench, theirs, log))
    with warnings.catch_warnings():
        # Python 3.12 warns of forks in processes with threads; those of a numeric library, if any, are idle here.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    assert process.pid
    try:
        status, why = _listen(ours, bench.deadline + GRACE_SECONDS, hear)
        if status == "died":
            process.join(_EXIT_SECONDS)
            status, why = "failed", _death(process.exitcode)
    finally:
        _kill_group(process.pid)  # with whatever it has started
        process.join()
        ours.close()
    return Outcome(status=status, seconds=round(time.monotonic() - began, 1), why=why)


def _listen(pipe: Connection, until: float, hear: Callable[[Finding], None]) -> tuple[str, str]:
    while pipe.poll(max(0.0, until - time.monotonic())):
        try:
            message: dict[str, Any] = json.loads(pipe.recv_bytes())
        except EOFError:
            return "died", ""
        if "status" in message:
            return message["status"], message["why"]
        hear(Finding(**message))
    return "timed out", "it was killed when its time was over"


def _child(module: str, bench: Bench, pipe: Connection, log: Path) -> None:
    """Ends the process without a farewell: a spoilt context can hang in it."""
    os.setpgid(0, 0)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect(log, module)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, bench.seconds_left))  # where it hangs, before it is killed
    for message in _messages(module, bench):
        pipe.send_bytes(json.dumps(message).encode())
    sys.stderr.flush()
    os._exit(0)


def _messages(module: str, bench: Bench) -> Iterator[dict[str, Any]]:
    try:
        for finding in importlib.import_module(module).run(bench):
            yield asdict(finding)
    except Unsupported as error:
        yield {"status": "skipped", "why": str(error)}
    except BaseException as error:  # also SystemExit, and panics of libraries in Rust, which are no Exception
        traceback.print_exc()
        yield {"status": "failed", "why": _one_line(error)}
    else:
        yield {"status": "done", "why": ""}


def _redirect(log: Path, module: str) -> None:
    """Everything that is printed, also by native code, goes to the end of the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.write(2, f"\n== {module}\n".encode())


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}; the log may say more"
    return f"its process ended with {code}; the log may say more"


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
