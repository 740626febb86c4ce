"""Heartbeats of a loading engine, and the stack traces of one that hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from app.engine.watchdog import heartbeat
from tests.support import ROOT


def test_heartbeat_runs_until_the_end_and_stops_without_a_listener() -> None:
    beats: list[float] = []
    deadline = time.monotonic() + 60
    with heartbeat(lambda: beats.append(time.monotonic()), 0.01):
        while len(beats) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    count = len(beats)
    assert count >= 3
    time.sleep(0.05)
    assert len(beats) == count

    def beat() -> None:
        raise BrokenPipeError

    with heartbeat(beat, 0.01):
        time.sleep(0.05)


def _hang(folder: Path, program: str) -> str:
    """Stderr is a file, so the process itself can see whether the trace was written."""
    words = "import ctypes, os, time; from app.engine.watchdog import HangTrace; trace = HangTrace(0.5)\n"
    with (folder / "stderr").open("w") as output:
        subprocess.run([sys.executable, "-c", words + program], cwd=ROOT, stderr=output, check=True, timeout=60)
    return (folder / "stderr").read_text()


def test_hanging_process_reports_its_stack_even_while_it_holds_the_gil(tmp_path: Path) -> None:
    """A loop that reports progress prints nothing, unless it gets no core for half a second three times."""
    stuck = "def stuck():\n    while not os.fstat(2).st_size: ctypes.PyDLL(None).usleep(ctypes.c_uint(800_000))\n"
    output = _hang(tmp_path, f"{stuck}trace.alive(time.monotonic())\nstuck()")
    assert "Timeout" in output and "stuck" in output
    program = "for _ in range(100): trace.alive(time.monotonic()); time.sleep(0.01)"
    assert "" in (_hang(tmp_path, program) for _ in range(3))
