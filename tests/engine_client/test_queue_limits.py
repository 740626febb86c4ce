"""The queue limits of the API process: bounds, positions and wait estimates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import InvalidRequest, QueueFull
from app.common.types import Request, RequestStarted
from app.engine.sampling.sampler_io import StepResult
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from app.engine_client.fair_queue import FairQueue, QueueLimits, ThroughputEstimate


def _request(name: str, salt: str = "", *, prompt: int = 1, max_tokens: int = 10, leader: str | None = None) -> Request:
    return Request(id=name, prompt=(1,) * prompt, max_tokens=max_tokens, cache_namespace=salt, leader=leader)


def _line(requests: int = 100, tokens: int = 1000) -> FairQueue:
    return FairQueue(QueueLimits(max_requests=requests, max_prompt_tokens=tokens))


def _start(line: FairQueue, name: str, now: float, *, has_backlog: bool = True) -> None:
    line.on_report([RequestStarted(name, 0)], now, has_backlog=has_backlog)


def test_texts_that_are_being_read_count_as_waiting() -> None:
    line = _line(requests=3, tokens=100)
    with line.reserved("", 2, 60, 0.0):
        with pytest.raises(QueueFull, match="2 requests wait"), line.reserved("", 2, 1, 0.0):
            pass
        with pytest.raises(QueueFull, match="60 prompt tokens"), line.reserved("", 1, 41, 0.0):
            pass
        with pytest.raises(QueueFull):
            line.check([_request("a", prompt=41)], 0.0)
        line.check([_request("a", prompt=40)], 0.0)
    assert not line._subqueues
    with line.reserved("", 3, 1000, 0.0):  # the only one may be longer than the bound
        pass


def test_what_never_fits_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="at most 3 at once"), _line(requests=3).reserved("", 4, 4, 0.0):
        pass


def test_a_reservation_ends_in_every_case() -> None:
    line = _line(requests=1)
    with pytest.raises(RuntimeError), line.reserved("", 1, 10, 0.0):
        raise RuntimeError
    line.check([_request("a")], 0.0)


def test_no_caller_fills_the_queue_alone_where_callers_are_told_apart() -> None:
    line = _line(requests=64)

    def fill(salt: str) -> int:
        for i in range(100):
            try:
                line.check([_request(f"{salt}{i}", salt)], 0.0)
            except QueueFull:
                return i
            line.add(_request(f"{salt}{i}", salt))
        raise AssertionError("no bound")

    assert fill("ann") == 56
    assert fill("bob") == 7
    assert fill("cyd") == 1
    assert _line_filled_by_everybody() == 64


def _line_filled_by_everybody() -> int:
    line = _line(requests=64)
    for i in range(64):
        line.check([_request(str(i))], 0.0)
        line.add(_request(str(i)))
    with pytest.raises(QueueFull):
        line.check([_request("more")], 0.0)
    return len(line._entries)


def test_a_request_that_would_begin_too_late_is_refused_at_once() -> None:
    line = _line()
    for i in range(20):
        line.add(_request(str(i)))
    for i in range(10):
        _start(line, str(i), float(i))
    with pytest.raises(QueueFull, match=r"would wait (9|1[01]) s for its turn, and its time allows 5") as refused:
        line.reserved("", 1, 1, 9.0, 5.0).__enter__()
    assert 8 <= refused.value.retry_after <= 12
    with line.reserved("", 1, 1, 9.0, 15.0):
        pass
    line.on_report([], 10.0, has_backlog=False)  # the measured pace means nothing once no request waits in the engine
    with line.reserved("", 1, 1, 10.0, 5.0):
        pass


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_places_are_those_of_the_engine(n_callers: int, seed: int) -> None:
    """A scheduler with one place, and requests that come and go: the line foretells how many come before each."""
    draw, line = random.Random(seed), _line()
    scheduler = Scheduler(StepLimits(tokens_per_step=8, max_running=1), BlockPool(64, 4))
    foretold: dict[str, int] = {}
    for i in range(40):
        request = _request(f"r{i}", f"salt {draw.randrange(n_callers)}", max_tokens=1)
        scheduler.add(request)
        line.add(request)
        if draw.random() < 0.1:
            victim = draw.choice(list(line._entries))
            scheduler.cancel(victim)
            line.remove(victim)
    for name in line._entries:
        foretold[name] = line.position(name) or 0
    order = []
    while scheduler.has_work:
        plan = scheduler.plan()
        order += [started.request_id for started in plan.started]
        line.on_report(plan.started, 0.0, has_backlog=True)
        scheduler.cancel(plan.chunks[0].sequence.request.id)
        scheduler.commit(type(plan)(()), StepResult())
    assert [foretold[name] for name in order] == list(range(len(order)))
    assert not line._entries and not line._subqueues


def test_a_replayed_request_keeps_its_place() -> None:
    line = _line()
    for name in ("a", "b", "a"):
        line.add(_request(name))
    assert [line.position(name) for name in ("a", "b", "c")] == [0, 1, None]


def test_a_batch_of_starts_moves_the_queue_as_fast_as_the_same_starts_one_by_one() -> None:
    waits = []
    for at_once in (1, 8):
        line = _line()
        for i in range(100):
            line.add(_request(str(i)))
        for i in range(0, 80, at_once):
            started = [RequestStarted(str(i + k), 0) for k in range(at_once)]
            line.on_report(started, i / 10, has_backlog=True)
        waits.append(line.eta_seconds(9, i / 10))
    assert waits[0] == pytest.approx(1.0, rel=0.05)
    assert waits[1] == pytest.approx(1.0, rel=0.15)


def test_idle_time_and_starts_without_a_queue_do_not_count() -> None:
    pace = ThroughputEstimate()
    for i in range(100):
        pace.record(10, i * 10.0, has_backlog=False)
    assert pace.seconds_for(10, 10, 1e6) == pytest.approx(0.1)
    pace.record(0, 1000.0, has_backlog=True)
    for i in range(1, 101):
        pace.record(10, 1000.0 + i, has_backlog=i < 100)
    before = pace.seconds_for(100, 10, 1100.0)
    assert before == pytest.approx(10, rel=0.1)
    assert pace.seconds_for(100, 10, 5000.0) == before


def test_work_counts_not_requests_alone() -> None:
    """A queue of long texts is slower than one of as many short ones, and forks read no prompt."""
    waits = []
    for last in ([_request(f"x{i}") for i in range(10)], [_request(f"x{i}", max_tokens=100) for i in range(10)]):
        line = _line()
        for i in range(50):
            line.add(_request(str(i)))
        for i in range(50):
            _start(line, str(i), float(i))
        for request in last:
            line.add(request)
        waits.append(line.eta_seconds(9, 49.0))
    assert 7 < waits[1] / waits[0] < 11


def test_an_engine_that_stands_still_is_told_by_retry_after_between_its_bounds() -> None:
    line = _line()
    assert line.retry_after(0.0) == 1
    for i in range(50):
        line.add(_request(str(i)))
    for i in range(10):
        _start(line, str(i), i * 0.1)
    seen = [line.retry_after(1.0 + seconds) for seconds in (0, 5, 20, 100, 10_000)]
    assert seen == sorted(seen) and 3 <= seen[0] <= 6 and seen[-1] == 120 and len(set(seen)) >= 4
