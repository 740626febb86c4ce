"""Guided requests wait only for grammars of their own key."""

from __future__ import annotations

import pytest

from app.common.types import Request
from app.engine.guided.grammar_compile_queue import GrammarCompileQueue
from app.engine.guided.grammar_workers import Job


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
