"""Watchdog of the engine process: a heartbeat while it loads, and a stack trace where it hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.common.ipc import WorkerConfig
from app.engine.worker_loop import heartbeat
from app.engine_client.client import EngineClient
from app.engine_client.engine_pool import EnginePool
from app.engine_client.fair_queue import FairQueue, QueueLimits
from tests.support import ROOT


def test_a_heart_beats_from_beginning_to_end_and_no_longer() -> None:
    beats: list[float] = []
    deadline = time.monotonic() + 60
    with heartbeat(lambda: beats.append(time.monotonic()), 0.01):
        while len(beats) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    count = len(beats)
    assert count >= 3
    time.sleep(0.05)
    assert len(beats) == count


def test_a_heartbeat_stops_where_no_process_listens() -> None:
    def beat() -> None:
        raise BrokenPipeError

    with heartbeat(beat, 0.01):
        time.sleep(0.05)


def _hang(folder: Path, program: str) -> str:
    """Its standard error, which is a file: the process can see there whether the trace was written."""
    words = "import ctypes, os, time; from app.engine.worker_loop import HangTrace; trace = HangTrace(0.5)\n"
    with (folder / "told").open("w") as output:
        subprocess.run([sys.executable, "-c", words + program], cwd=ROOT, stderr=output, check=True, timeout=60)
    return (folder / "told").read_text()


def test_a_process_that_hangs_says_where_also_where_it_holds_the_gil(tmp_path: Path) -> None:
    stuck = "def stuck():\n    while not os.fstat(2).st_size: ctypes.PyDLL(None).usleep(ctypes.c_uint(800_000))\n"
    output = _hang(tmp_path, f"{stuck}trace.alive(time.monotonic())\nstuck()")
    assert "Timeout" in output and "stuck" in output


def test_a_process_that_goes_round_says_nothing(tmp_path: Path) -> None:
    """Unless it gets no core for half a second; hardly three times."""
    program = "for _ in range(100): trace.alive(time.monotonic()); time.sleep(0.01)"
    assert "" in (_hang(tmp_path, program) for _ in range(3))


def test_an_engine_that_never_says_anything_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.engine_client.supervisor._STARTING_SILENCE", 0.5)
    limits = QueueLimits(max_requests=1, max_prompt_tokens=1)

    async def scenario() -> None:
        command = (sys.executable, "-c", "import time; time.sleep(60)")
        line = FairQueue(limits)
        client = EnginePool([EngineClient(WorkerConfig(weights=""), silence_seconds=0.2, command=command)], line)
        client.start()
        try:
            stopped = await asyncio.wait_for(client.wait_stopped(), 60)
            assert client.restarts == 3 and stopped.exit_code == 1
        finally:
            await client.stop()

    asyncio.run(scenario())
