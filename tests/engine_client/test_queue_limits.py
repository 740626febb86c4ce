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


def _request(
    name: str, namespace: str = "", *, prompt: int = 1, max_tokens: int = 10, leader: str | None = None
) -> Request:
    return Request(id=name, prompt=(1,) * prompt, max_tokens=max_tokens, cache_namespace=namespace, leader=leader)


def _queue(requests: int = 100, tokens: int = 1000) -> FairQueue:
    return FairQueue(QueueLimits(max_requests=requests, max_prompt_tokens=tokens))


def _start(queue: FairQueue, name: str, now: float, *, has_backlog: bool = True) -> None:
    queue.on_report([RequestStarted(name, 0)], now, has_backlog=has_backlog)


def test_texts_that_are_being_read_count_as_waiting() -> None:
    queue = _queue(requests=3, tokens=100)
    with queue.reserved("", 2, 60, 0.0):
        with pytest.raises(QueueFull, match="2 requests wait"), queue.reserved("", 2, 1, 0.0):
            pass
        with pytest.raises(QueueFull, match="60 prompt tokens"), queue.reserved("", 1, 41, 0.0):
            pass
        with pytest.raises(QueueFull):
            queue.check([_request("a", prompt=41)], 0.0)
        queue.check([_request("a", prompt=40)], 0.0)
    assert not queue._subqueues
    with queue.reserved("", 3, 1000, 0.0):  # the only one may be longer than the bound
        pass


def test_what_never_fits_is_an_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="at most 3 at once"), _queue(requests=3).reserved("", 4, 4, 0.0):
        pass


def test_a_reservation_ends_in_every_case() -> None:
    queue = _queue(requests=1)
    with pytest.raises(RuntimeError), queue.reserved("", 1, 10, 0.0):
        raise RuntimeError
    queue.check([_request("a")], 0.0)


def test_no_caller_fills_the_queue_alone_where_callers_are_told_apart() -> None:
    queue = _queue(requests=64)

    def fill(namespace: str) -> int:
        for i in range(100):
            try:
                queue.check([_request(f"{namespace}{i}", namespace)], 0.0)
            except QueueFull:
                return i
            queue.add(_request(f"{namespace}{i}", namespace))
        raise AssertionError("no bound")

    assert fill("ann") == 56
    assert fill("bob") == 7
    assert fill("cyd") == 1
    assert _queue_filled_without_tenants() == 64


def _queue_filled_without_tenants() -> int:
    queue = _queue(requests=64)
    for i in range(64):
        queue.check([_request(str(i))], 0.0)
        queue.add(_request(str(i)))
    with pytest.raises(QueueFull):
        queue.check([_request("more")], 0.0)
    return len(queue._entries)


def test_a_request_that_would_begin_too_late_is_refused_at_once() -> None:
    queue = _queue()
    for i in range(20):
        queue.add(_request(str(i)))
    for i in range(10):
        _start(queue, str(i), float(i))
    with pytest.raises(QueueFull, match=r"would wait (9|1[01]) s for its turn, and its time allows 5") as refused:
        queue.reserved("", 1, 1, 9.0, 5.0).__enter__()
    assert 8 <= refused.value.retry_after <= 12
    with queue.reserved("", 1, 1, 9.0, 15.0):
        pass
    queue.on_report([], 10.0, has_backlog=False)  # the measured pace means nothing once no request waits in the engine
    with queue.reserved("", 1, 1, 10.0, 5.0):
        pass


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_places_are_those_of_the_engine(n_tenants: int, seed: int) -> None:
    """A scheduler with one slot, and requests that arrive and leave: the queue predicts how many precede each."""
    draw, queue = random.Random(seed), _queue()
    scheduler = Scheduler(StepLimits(tokens_per_step=8, max_running=1), BlockPool(64, 4))
    foretold: dict[str, int] = {}
    for i in range(40):
        request = _request(f"r{i}", f"tenant {draw.randrange(n_tenants)}", max_tokens=1)
        scheduler.add(request)
        queue.add(request)
        if draw.random() < 0.1:
            victim = draw.choice(list(queue._entries))
            scheduler.cancel(victim)
            queue.remove(victim)
    for name in queue._entries:
        foretold[name] = queue.position(name) or 0
    order = []
    while scheduler.has_work:
        plan = scheduler.plan()
        order += [started.request_id for started in plan.started]
        queue.on_report(plan.started, 0.0, has_backlog=True)
        scheduler.cancel(plan.chunks[0].sequence.request.id)
        scheduler.commit(type(plan)(()), StepResult())
    assert [foretold[name] for name in order] == list(range(len(order)))
    assert not queue._entries and not queue._subqueues


def test_a_replayed_request_keeps_its_place() -> None:
    queue = _queue()
    for name in ("a", "b", "a"):
        queue.add(_request(name))
    assert [queue.position(name) for name in ("a", "b", "c")] == [0, 1, None]


def test_a_batch_of_starts_moves_the_queue_as_fast_as_the_same_starts_one_by_one() -> None:
    waits = []
    for at_once in (1, 8):
        queue = _queue()
        for i in range(100):
            queue.add(_request(str(i)))
        for i in range(0, 80, at_once):
            started = [RequestStarted(str(i + k), 0) for k in range(at_once)]
            queue.on_report(started, i / 10, has_backlog=True)
        waits.append(queue.eta_seconds(9, i / 10))
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
        queue = _queue()
        for i in range(50):
            queue.add(_request(str(i)))
        for i in range(50):
            _start(queue, str(i), float(i))
        for request in last:
            queue.add(request)
        waits.append(queue.eta_seconds(9, 49.0))
    assert 7 < waits[1] / waits[0] < 11


def test_an_engine_that_stands_still_is_told_by_retry_after_between_its_bounds() -> None:
    queue = _queue()
    assert queue.retry_after(0.0) == 1
    for i in range(50):
        queue.add(_request(str(i)))
    for i in range(10):
        _start(queue, str(i), i * 0.1)
    seen = [queue.retry_after(1.0 + seconds) for seconds in (0, 5, 20, 100, 10_000)]
    assert seen == sorted(seen) and 3 <= seen[0] <= 6 and seen[-1] == 120 and len(set(seen)) >= 4
