"""Guided requests wait in the compile queue, and only for their own key's grammars."""

from __future__ import annotations

import pytest

from app.common.types import Request
from app.engine.guided.grammar_workers import Job
from app.engine.worker_loop import GrammarCompileQueue


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

    def finish(self, name: str, error: BaseException | None = None) -> None:
        self.jobs[name].error = error
        self.jobs[name].done = True


def _request(name: str, namespace: str = "") -> Request:
    return Request(id=name, prompt=(1,), max_tokens=1, grammar='start: "a"', cache_namespace=namespace)


def _queue(*names: str, most: int = 9) -> tuple[GrammarCompileQueue, ManualTracker]:
    """Requests of these names; the part before a slash is the key."""
    tracker = ManualTracker()
    queue = GrammarCompileQueue(tracker, max_prepared=most)
    for name in names:
        queue.add(_request(name, name.partition("/")[0] if "/" in name else ""))
    return queue, tracker


def _ready(queue: GrammarCompileQueue) -> list[str]:
    return [request.id for request in queue.pop_ready()]


def test_requests_of_one_key_leave_in_their_order_once_their_grammars_are_compiled() -> None:
    queue, tracker = _queue("a", "b", "c")
    assert queue.wait_seconds(1.0) < 0.1, "the engine looks again soon"
    tracker.finish("b")
    assert _ready(queue) == [] and queue.n_waiting == 3
    tracker.finish("a")
    assert _ready(queue) == ["a", "b"]
    tracker.finish("c")
    assert _ready(queue) == ["c"]
    assert queue.wait_seconds(1.0) == 1.0


def test_a_request_does_not_wait_for_the_grammar_of_another_key() -> None:
    queue, tracker = _queue("x/1", "x/2", "y/1")
    tracker.finish("y/1")
    assert _ready(queue) == ["y/1"]


def test_who_is_cancelled_never_leaves_and_is_forgotten() -> None:
    queue, tracker = _queue("a", "b")
    tracker.finish("a")
    tracker.finish("b")
    queue.cancel("a")
    queue.cancel("unknown")
    assert _ready(queue) == ["b"]
    assert tracker.forgotten == ["a", "unknown"]


def test_a_mishap_in_the_thread_fails_its_request_alone_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    queue, tracker = _queue("a", "b")
    tracker.finish("a", RuntimeError("out of luck"))
    tracker.finish("b")
    assert _ready(queue) == ["b"]
    assert [failed.request_id for failed in queue.take_failed()] == ["a"]
    assert queue.take_failed() == (), "reported once"
    assert "request a failed" in caplog.text and "out of luck" in caplog.text


def test_no_more_grammars_are_compiled_ahead_than_are_kept() -> None:
    queue, tracker = _queue("a", "b", "c", "d", most=2)
    assert list(tracker.jobs) == ["a", "b"]
    tracker.finish("a")
    tracker.finish("b")
    assert _ready(queue) == ["a", "b"] and list(tracker.jobs) == ["a", "b"]
    tracker.jobs.pop("a")  # the engine has started it
    assert _ready(queue) == [] and list(tracker.jobs) == ["b", "c"]
    queue.cancel("d")
    tracker.finish("c")
    assert _ready(queue) == ["c"] and queue.wait_seconds(1.0) == 1.0


def test_one_key_leaves_capacity_for_the_next() -> None:
    _, tracker = _queue(*[f"x/{i}" for i in range(40)], "y/1", most=32)
    assert len(tracker.jobs) == 29 and "y/1" in tracker.jobs
