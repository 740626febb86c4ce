"""Guided requests wait in the compile queue, and only for their own key's grammars."""

from __future__ import annotations

import pytest

from app.common.types import Request
from app.engine.guided.grammar_compile_queue import GrammarCompileQueue
from app.engine.guided.grammar_workers import Job


class ManualGuides:
    """Grammars that are compiled when the test says so."""

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


def _request(name: str, salt: str = "") -> Request:
    return Request(id=name, prompt=(1,), max_tokens=1, grammar='start: "a"', cache_namespace=salt)


def _queue(*names: str, most: int = 9) -> tuple[GrammarCompileQueue, ManualGuides]:
    """Requests of these names; the part before a slash is the key."""
    guides = ManualGuides()
    door = GrammarCompileQueue(guides, max_prepared=most)
    for name in names:
        door.add(_request(name, name.partition("/")[0] if "/" in name else ""))
    return door, guides


def _ready(door: GrammarCompileQueue) -> list[str]:
    return [request.id for request in door.pop_ready()]


def test_requests_of_one_key_leave_in_their_order_once_their_grammars_are_compiled() -> None:
    door, guides = _queue("a", "b", "c")
    assert door.wait_seconds(1.0) < 0.1, "the engine looks again soon"
    guides.finish("b")
    assert _ready(door) == [] and door.n_waiting == 3
    guides.finish("a")
    assert _ready(door) == ["a", "b"]
    guides.finish("c")
    assert _ready(door) == ["c"]
    assert door.wait_seconds(1.0) == 1.0


def test_a_request_does_not_wait_for_the_grammar_of_another_key() -> None:
    door, guides = _queue("x/1", "x/2", "y/1")
    guides.finish("y/1")
    assert _ready(door) == ["y/1"]


def test_who_is_cancelled_never_leaves_and_is_forgotten() -> None:
    door, guides = _queue("a", "b")
    guides.finish("a")
    guides.finish("b")
    door.cancel("a")
    door.cancel("unknown")
    assert _ready(door) == ["b"]
    assert guides.forgotten == ["a", "unknown"]


def test_a_mishap_in_the_thread_fails_its_request_alone_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    door, guides = _queue("a", "b")
    guides.finish("a", RuntimeError("out of luck"))
    guides.finish("b")
    assert _ready(door) == ["b"]
    assert [failed.request_id for failed in door.take_failed()] == ["a"]
    assert door.take_failed() == (), "told once"
    assert "request a failed" in caplog.text and "out of luck" in caplog.text


def test_no_more_grammars_are_compiled_ahead_than_are_kept() -> None:
    door, guides = _queue("a", "b", "c", "d", most=2)
    assert list(guides.jobs) == ["a", "b"]
    guides.finish("a")
    guides.finish("b")
    assert _ready(door) == ["a", "b"] and list(guides.jobs) == ["a", "b"]
    guides.jobs.pop("a")  # the engine has begun with it
    assert _ready(door) == [] and list(guides.jobs) == ["b", "c"]
    door.cancel("d")
    guides.finish("c")
    assert _ready(door) == ["c"] and door.wait_seconds(1.0) == 1.0


def test_one_key_leaves_capacity_for_the_next() -> None:
    _, guides = _queue(*[f"x/{i}" for i in range(40)], "y/1", most=32)
    assert len(guides.jobs) == 29 and "y/1" in guides.jobs
