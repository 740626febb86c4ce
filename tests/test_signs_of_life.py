"""What the engine process shows of itself: a heartbeat while it loads, and where it hangs."""

from __future__ import annotations

import subprocess
import sys
import time

from conftest import ROOT

from app.engine.signs_of_life import heartbeat


def test_a_heart_beats_from_beginning_to_end_and_no_longer() -> None:
    beats: list[float] = []
    with heartbeat(lambda: beats.append(time.monotonic()), 0.01):
        time.sleep(0.2)
    count = len(beats)
    assert count >= 3
    time.sleep(0.05)
    assert len(beats) == count


def test_a_heart_stops_where_nobody_listens() -> None:
    def beat() -> None:
        raise BrokenPipeError

    with heartbeat(beat, 0.01):
        time.sleep(0.05)


def _hang(program: str) -> str:
    words = f"import ctypes, time; from app.engine.signs_of_life import HangTrace; trace = HangTrace(0.5)\n{program}"
    return subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=True).stderr


def test_a_process_that_hangs_says_where_also_where_nobody_else_gets_the_gil() -> None:
    told = _hang(
        "def stuck(): ctypes.PyDLL(None).usleep(ctypes.c_uint(800_000))\ntrace.alive(time.monotonic())\nstuck()"
    )
    assert "Timeout" in told and "stuck" in told


def test_a_process_that_goes_round_says_nothing() -> None:
    assert _hang("for _ in range(100): trace.alive(time.monotonic()); time.sleep(0.01)") == ""
