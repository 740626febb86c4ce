"""The request queue: turns of tenants, bounds, exact positions, and wait estimates."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import InvalidRequest, QueueFull
from app.common.types import Request, RequestStarted
from app.engine_client.request_queue import RequestQueue


def _request(name: str, namespace: str = "", *, prompt: int = 1, max_tokens: int = 10, **fields: str) -> Request:
    return Request(id=name, prompt=(1,) * prompt, max_tokens=max_tokens, cache_namespace=namespace, **fields)


def _queue(requests: int = 100, tokens: int = 1000) -> RequestQueue:
    return RequestQueue(max_requests=requests, max_prompt_tokens=tokens)


def _start(queue: RequestQueue, name: str, now: float, *, has_backlog: bool = True) -> None:
    queue.on_report([RequestStarted(name, 0)], now, has_backlog=has_backlog)


def test_prompts_being_tokenized_count_as_waiting() -> None:
    queue = _queue(requests=3, tokens=100)
    with queue.reserved("", 2, 60, 0.0):
        with pytest.raises(QueueFull, match="2 requests wait"), queue.reserved("", 2, 1, 0.0):
            pass
        with pytest.raises(QueueFull, match="60 prompt tokens"), queue.reserved("", 1, 41, 0.0):
            pass
        with pytest.raises(QueueFull):
            queue.check([_request("a", prompt=41)], 0.0)
        queue.check([_request("a", prompt=40)], 0.0)
    with pytest.raises(RuntimeError), queue.reserved("", 3, 1000, 0.0):  # a single request may exceed the bound
        raise RuntimeError
    assert not queue._subqueues
    with pytest.raises(InvalidRequest, match="at most 3 at once"), queue.reserved("", 4, 4, 0.0):
        pass


def test_without_keys_one_client_may_fill_the_queue_and_with_keys_none_can() -> None:
    def fill(queue: RequestQueue, namespace: str) -> int:
        for i in range(100):
            try:
                queue.check([_request(f"{namespace}{i}", namespace)], 0.0)
            except QueueFull:
                return i
            queue.add(_request(f"{namespace}{i}", namespace))
        raise AssertionError("no bound")

    queue = _queue(requests=64)
    assert [fill(queue, namespace) for namespace in ("ann", "bob", "cyd")] == [56, 7, 1]
    assert fill(_queue(requests=64), "") == 64


def test_request_that_would_start_too_late_is_refused_at_once() -> None:
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
    for i in range(10, 20):
        assert queue.take(lambda _: 0) == (str(i), 0)
    queue.on_report([], 10.0, has_backlog=False)  # the throughput is meaningless once an engine has all requests
    with queue.reserved("", 1, 1, 10.0, 5.0):
        pass


def _taken(queue: RequestQueue, choose: Callable[[str], int | None] = lambda _: 0) -> str:
    """Takes all requests, in order."""
    names = []
    while taken := queue.take(choose):
        names.append(taken[0])
    return " ".join(names)


def _queue_of(*names: str) -> RequestQueue:
    """A queue with these requests; the first letter names the tenant."""
    queue = _queue()
    for name in names:
        queue.add(_request(name, name[0]))
    return queue


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_positions_are_exact(n_tenants: int, seed: int) -> None:
    """Requests arrive and leave while an engine has some: the queue predicts how many precede each."""
    draw, queue = random.Random(seed), _queue()
    for i in range(40):
        queue.add(_request(f"r{i}", f"tenant {draw.randrange(n_tenants)}", max_tokens=1))
        if draw.random() < 0.1:
            queue.remove(draw.choice(list(queue._entries)))
        if draw.random() < 0.1:
            queue.take(lambda _: 0)
    foretold = {name: queue.position(name) for name in queue._entries}
    order = [*queue._sent, *_taken(queue).split()]
    assert [foretold[name] for name in order] == list(range(len(order)))
    for name in order:
        assert queue.position(name) == 0
        queue.on_report([RequestStarted(name, 0)], 0.0, has_backlog=True)
    assert not queue._entries and not queue._subqueues and queue.position("r0") is None


def test_tenants_take_turns_and_continue_where_they_stopped() -> None:
    queue = _queue_of("a1", "a2", "a3", "b1", "c1", "c2")
    assert queue.take(lambda _: 0) == ("a1", 0)
    queue.add(_request("b2", "b"))
    assert _taken(queue) == "b1 c1 a2 b2 c2 a3"


def test_returning_request_is_first_of_its_tenant() -> None:
    queue = _queue_of("a1", "b1")
    for name in ("a0", "a-"):
        queue.add(_request(name, "a"), first=True)
    assert [queue.position(name) for name in ("a-", "b1", "a0", "a1")] == [0, 1, 2, 3]
    assert _taken(queue) == "a- b1 a0 a1"


def test_tenant_without_capacity_is_skipped_after_one_attempt() -> None:
    queue, asked = _queue_of("a1", "a2", "b1", "b2"), []

    def choose(name: str) -> int | None:
        asked.append(name)
        return None if name[0] == "a" else 7

    assert queue.take(choose) == ("b1", 7)
    assert asked == ["a1", "b1"]


def test_followers_without_capacity_let_others_of_their_tenant_pass() -> None:
    queue = _queue()
    for request in (_request("a1", leader="a0"), _request("a2", leader="a0"), _request("a3"), _request("a4")):
        queue.add(request)
    assert _taken(queue, lambda name: None if name in ("a1", "a4") else 0) == "a2 a3"
    assert [queue.position(name) for name in ("a1", "a4")] == [2, 3]


def test_requests_without_a_grammar_pass_those_that_wait_for_grammars() -> None:
    queue, asked = _queue(), []
    for name in ("g0", "g1", "a0", "g2", "a1"):
        queue.add(_request(name, grammar="start: /a/" if name[0] == "g" else ""))

    def choose(name: str) -> int | None:
        asked.append(name)
        return None if name[0] == "g" else 0

    assert _taken(queue, choose) == "a0 a1"
    assert asked == ["g0", "a0", "g0", "a1", "g0"]


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32))
def test_wait_is_bounded_by_own_requests_ahead_times_tenants(n_tenants: int, slots: int, seed: int) -> None:
    """Continuous arrivals from tenants with very different rates."""
    draw, queue, waited, tenant_of = random.Random(seed), _queue(1000), dict[str, list[int]](), dict[str, str]()
    for i in range(200):
        # The first tenant sends as many as all others together.
        name = str(i)
        tenant_of[name] = tenant = str(max(0, draw.randrange(2 * n_tenants) - n_tenants))
        before = sum(tenant_of[other] == tenant for other in waited)
        waited[name] = [0, (before + 1) * n_tenants]
        queue.add(_request(name, tenant))
        for _ in range(slots if draw.random() < 0.8 else 0):
            if taken := queue.take(lambda _: 0):
                del waited[taken[0]]
                for counts in waited.values():
                    counts[0] += 1
        assert all(n_before < bound for n_before, bound in waited.values())


def test_batched_and_single_starts_give_the_same_throughput() -> None:
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


def test_wait_estimate_is_based_on_work_not_on_requests() -> None:
    """A queue of long requests is slower than one of as many short ones, and forks have no prompt to process."""
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


def test_retry_after_of_a_stalled_engine_grows_within_its_bounds() -> None:
    queue = _queue()
    assert queue.retry_after(0.0) == 1
    for i in range(50):
        queue.add(_request(str(i)))
    for i in range(10):
        _start(queue, str(i), i * 0.1)
    seen = [queue.retry_after(1.0 + seconds) for seconds in (0, 5, 20, 100, 10_000)]
    assert seen == sorted(seen) and 3 <= seen[0] <= 6 and seen[-1] == 120 and len(set(seen)) >= 4
