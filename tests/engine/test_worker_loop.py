"""The engine process's loop: guided requests wait only for grammars of their own key, and a watchdog reports hangs."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.common.types import Request
from app.engine.guided.grammar_workers import Job
from app.engine.worker_loop import GrammarCompileQueue, heartbeat
from tests.support import ROOT


class ManualTracker:
    """A tracker whose grammars finish compiling when the test calls finish()."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.forgotten: list[str] = []

    @property
    def n_prepared(self) -> int:
        return len(self.jobs)

    def prepare(self, request: Request) -> Job:
        self.jobs[request.id] = Job(request.cache_namespace, lambda: None)
        return self.jobs[request.id]

    def forget(self, request_id: str) -> None:
        self.jobs.pop(request_id, None)
        self.forgotten.append(request_id)

    def take_work(self) -> tuple[tuple[str, float], ...]:
        return ()

    def finish(self, *names: str, error: BaseException | None = None) -> None:
        for name in names:
            self.jobs[name].error = error
            self.jobs[name].done = True


def _queue(*names: str, most: int = 9) -> tuple[GrammarCompileQueue, ManualTracker]:
    """A queue with requests of these names; the part before a slash is the key."""
    tracker = ManualTracker()
    queue = GrammarCompileQueue(tracker, max_prepared=most)
    for name in names:
        key = name.partition("/")[0] if "/" in name else ""
        queue.add(Request(id=name, prompt=(1,), max_tokens=1, grammar='start: "a"', cache_namespace=key))
    return queue, tracker


def _ready(queue: GrammarCompileQueue) -> list[str]:
    return [request.id for request in queue.pop_ready()]


def test_requests_of_one_key_leave_in_order_once_their_grammars_are_compiled() -> None:
    queue, tracker = _queue("x/1", "x/2", "x/3", "y/1")
    assert queue.wait_seconds(1.0) < 0.1, "the engine polls soon"
    tracker.finish("x/2", "y/1")
    assert _ready(queue) == ["y/1"] and queue.n_waiting == 3
    tracker.finish("x/1")
    assert _ready(queue) == ["x/1", "x/2"]
    tracker.finish("x/3")
    assert _ready(queue) == ["x/3"]
    assert queue.wait_seconds(1.0) == 1.0


def test_cancelled_request_never_leaves_and_is_forgotten() -> None:
    queue, tracker = _queue("a", "b")
    tracker.finish("a", "b")
    queue.cancel("a")
    queue.cancel("unknown")
    assert _ready(queue) == ["b"]
    assert tracker.forgotten == ["a", "unknown"]


def test_exception_in_the_thread_fails_only_its_request_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    queue, tracker = _queue("a", "b")
    tracker.finish("a", error=RuntimeError("out of luck"))
    tracker.finish("b")
    assert _ready(queue) == ["b"]
    assert [failed.request_id for failed in queue.take_failed()] == ["a"]
    assert queue.take_failed() == (), "reported once"
    assert "request a failed" in caplog.text and "out of luck" in caplog.text


def test_grammars_compiled_ahead_are_bounded_and_each_key_leaves_capacity() -> None:
    queue, tracker = _queue("a", "b", "c", "d", most=2)
    tracker.finish("a", "b")
    assert _ready(queue) == ["a", "b"] and list(tracker.jobs) == ["a", "b"]
    tracker.jobs.pop("a")  # the engine started it
    assert _ready(queue) == [] and list(tracker.jobs) == ["b", "c"]
    queue.cancel("d")
    tracker.finish("c")
    assert _ready(queue) == ["c"] and queue.wait_seconds(1.0) == 1.0
    _, tracker = _queue(*[f"x/{i}" for i in range(40)], "y/1", most=32)
    assert len(tracker.jobs) == 29 and "y/1" in tracker.jobs


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
    words = "import ctypes, os, time; from app.engine.worker_loop import HangTrace; trace = HangTrace(0.5)\n"
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
