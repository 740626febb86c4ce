"""Admission order: tenants take turns, no request waits forever, and no tenant occupies all slots."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.common.types import Request, Sequence
from app.engine.sampling.sampler_io import SampledToken, StepResult
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits, WaitingQueue


def _sequence(name: str, namespace: str = "", leader: Sequence | None = None) -> Sequence:
    request = Request(id=name, prompt=(1, 2), max_tokens=8, cache_namespace=namespace)
    return Sequence(request=request, tokens=[1, 2], arrival=0, leader=leader)


def _names(sequences: list[Sequence]) -> str:
    return " ".join(sequence.request.id for sequence in sequences)


def _queue(*names: str) -> tuple[WaitingQueue, dict[str, Sequence]]:
    queue, made = WaitingQueue(), {name: _sequence(name, name[0]) for name in names}
    for sequence in made.values():
        queue.append(sequence)
    return queue, made


def test_callers_take_turns_and_go_on_where_they_stopped() -> None:
    queue, made = _queue("a1", "a2", "a3", "b1", "c1", "c2")
    assert _names(list(queue.candidates())) == "a1 b1 c1 a2 c2 a3"
    queue.admit([made["a1"]])
    assert _names(list(queue.candidates())) == "b1 c1 a2 c2 a3"
    queue.admit([made["b1"], made["c1"]])
    queue.append(_sequence("b2", "b"))
    assert _names(list(queue.candidates())) == "a2 c2 b2 a3"


def test_who_leaves_takes_no_turn_from_others_of_its_caller() -> None:
    queue, made = _queue("a1", "a2", "b1")
    queue.remove([made["a1"]])
    assert _names(list(queue.candidates())) == "a2 b1"


def test_who_gave_way_comes_before_all_others() -> None:
    queue, _ = _queue("a1", "b1")
    queue.requeue_first(back := _sequence("b0", "b"))
    assert _names(list(queue.candidates(lambda _: False))) == "b0"
    assert _names(list(queue.candidates())) == "b0 a1 b1"
    queue.admit([back])
    assert len(queue) == 2


def test_followers_let_their_own_and_others_pass_until_the_prompt_is_there() -> None:
    leader = _sequence("a0", "a")
    queue = WaitingQueue()
    for sequence in (_sequence("a1", "a", leader), _sequence("a2", "a"), _sequence("b1", "b")):
        queue.append(sequence)
    assert _names(list(queue.candidates())) == "a2 b1"
    leader.num_computed = 2
    assert _names(list(queue.candidates())) == "a1 b1 a2"


def test_a_caller_that_may_not_come_is_passed_over() -> None:
    queue, _ = _queue("a1", "a2", "b1", "b2")
    n_checks: Counter[str] = Counter()

    def may_come(namespace: str) -> bool:
        n_checks[namespace] += 1
        return namespace == "a" and n_checks[namespace] < 2

    assert _names(list(queue.candidates(may_come))) == "a1"
    assert n_checks == {"a": 2, "b": 1}


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32))
def test_a_request_waits_at_most_its_own_before_it_times_the_callers(n_tenants: int, slots: int, seed: int) -> None:
    """Continuous arrivals, of tenants with very different rates."""
    draw, queue, waited = random.Random(seed), WaitingQueue(), {}
    for i in range(200):
        # The first tenant sends as many as all others together.
        namespace = str(max(0, draw.randrange(2 * n_tenants) - n_tenants))
        sequence = _sequence(str(i), namespace)
        before = sum(s.request.cache_namespace == namespace for s in queue)
        waited[sequence.request.id] = [0, (before + 1) * n_tenants]
        queue.append(sequence)
        if draw.random() < 0.1:
            queue.requeue_first(back := _sequence(f"back {i}", namespace))
            queue.admit([back])
        if draw.random() < 0.8:
            candidates = queue.candidates()
            admitted = [s for s, _ in zip(candidates, range(slots), strict=False)]
            for index, one in enumerate(admitted):
                for name in (s.request.id for s in queue if s not in admitted[:index]):
                    waited[name][0] += 1
                assert one.request.id in waited
            queue.admit(admitted)
    assert all(admissions <= bound for admissions, bound in waited.values())


def _scheduler(max_running: int) -> Scheduler:
    return Scheduler(StepLimits(tokens_per_step=64, max_running=max_running), BlockPool(64, 16))


def _step(scheduler: Scheduler) -> list[str]:
    plan = scheduler.plan()
    scheduler.commit(plan, StepResult({c.sequence.request.id: SampledToken(5) for c in plan.chunks if c.samples}))
    return [started.request_id for started in plan.started]


def test_the_last_eighth_of_the_places_is_for_callers_that_have_none() -> None:
    scheduler = _scheduler(8)
    for i in range(20):
        scheduler.add(_sequence(f"a{i}", "a").request)
    assert _step(scheduler) == [f"a{i}" for i in range(7)]
    for name in ("b0", "b1"):
        scheduler.add(_sequence(name, "b").request)
    assert _step(scheduler) == ["b0"]
    assert _step(scheduler) == []


def test_where_callers_are_not_told_apart_all_places_are_for_all() -> None:
    scheduler = _scheduler(8)
    for i in range(20):
        scheduler.add(_sequence(str(i)).request)
    assert len(_step(scheduler)) == 8
