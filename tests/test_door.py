"""Requests wait for their guide at the door, and for nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from app.engine.door import Door
from app.engine.types import Request


def _request(name: str) -> Request:
    return Request(id=name, prompt=(1,), max_tokens=1, guide='start: "a"')


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert condition()


def test_requests_leave_in_their_order_once_their_guide_is_compiled() -> None:
    go_on, prepared = threading.Event(), list[str]()

    def prepare(request: Request) -> None:
        go_on.wait(60)
        prepared.append(request.id)

    door = Door(prepare, lambda _name: None, lambda: 0, most=9)
    assert door.wait_seconds(1.0) == 1.0
    for name in "abc":
        door.enter(_request(name))
    assert door.leave() == []
    assert door.wait_seconds(1.0) < 0.1, "the engine looks again soon"
    go_on.set()
    _wait_for(lambda: prepared == ["a", "b", "c"])
    left: list[str] = []
    _wait_for(lambda: left.extend(request.id for request in door.leave()) or left == ["a", "b", "c"])
    assert door.wait_seconds(1.0) == 1.0


def test_who_is_cancelled_never_leaves_and_is_forgotten() -> None:
    begun, go_on, forgotten = threading.Event(), threading.Event(), list[str]()

    def prepare(_request: Request) -> None:
        begun.set()
        go_on.wait(60)

    door = Door(prepare, forgotten.append, lambda: 0, most=9)
    for name in "ab":
        door.enter(_request(name))
    assert begun.wait(60)
    door.cancel("a")  # its guide is being compiled
    door.cancel("nobody")
    go_on.set()
    left: list[str] = []
    _wait_for(lambda: left.extend(request.id for request in door.leave()) or left == ["b"])
    assert forgotten == ["a", "nobody", "a"], "once more when it was compiled"


def test_a_mishap_in_the_thread_fails_its_request_alone_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def prepare(request: Request) -> None:
        if request.id == "a":
            raise RuntimeError("out of luck")

    door = Door(prepare, lambda _name: None, lambda: 0, most=9)
    for name in "ab":
        door.enter(_request(name))
    left: list[str] = []
    _wait_for(lambda: left.extend(request.id for request in door.leave()) or left == ["b"])
    assert [failed.request_id for failed in door.take_failed()] == ["a"]
    assert door.take_failed() == (), "told once"
    assert "request a failed" in caplog.text and "out of luck" in caplog.text


def test_no_more_guides_are_compiled_ahead_than_are_kept() -> None:
    kept = list[str]()
    door = Door(lambda request: kept.append(request.id), lambda _name: None, lambda: len(kept), most=2)
    for name in "abcd":
        door.enter(_request(name))
    left: list[str] = []
    _wait_for(lambda: left.extend(request.id for request in door.leave()) or left == ["a", "b"])
    time.sleep(0.02)
    assert kept == ["a", "b"] and door.leave() == []
    kept.remove("a")  # the engine has begun with it
    _wait_for(lambda: left.extend(request.id for request in door.leave()) or left == ["a", "b", "c"])
    door.cancel("d")
    kept.clear()
    assert door.leave() == [] and door.wait_seconds(1.0) == 1.0
