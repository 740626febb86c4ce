"""One step ahead: every stream as alone, at most one token wasted, no block freed while a step uses it."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from app.common.types import Sequence
from app.engine.execution.engine import Engine
from app.engine.scheduling.block_allocator import StepsInFlight
from app.engine.scheduling.scheduler import StepLimits
from tests.support.engine.delayed_runner import Delayed, engine_ahead
from tests.support.engine.in_flight_simulation import Faulty, World, has
from tests.support.engine.scheduler_simulation import VOCAB, SimulatedDevice, random_requests


def _simulate(rng: random.Random) -> Counter[str]:
    """One random schedule, with launches that are refused or raise; returns what happened in it."""
    block_size, longest, running = rng.choice([1, 2, 4]), rng.randint(8, 40), rng.randint(1, 8)
    limits = StepLimits(
        tokens_per_step=running + rng.randint(0, 12),
        max_running=running,
        prompt_tokens_with_decodes=rng.choice([None, 1, 3]),
    )
    blocks = -(-longest // block_size) + rng.randint(0, 12)
    raises, faulty, trouble = "", Faulty(block_size), rng.choice([0.0, 0.0, 0.1])

    def start() -> tuple[Engine, Delayed]:
        faulty.device = SimulatedDevice(block_size)
        engine, device = engine_ahead(faulty, limits, blocks=blocks, block_size=block_size)
        device.refuses = lambda _plan: rng.random() < trouble
        device.before_launch = lambda plan: _raise(has(plan, raises) or rng.random() < trouble)
        device.before_run = lambda plan: _raise(has(plan, raises))
        return engine, device

    requests = random_requests(rng, longest, [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 12))])
    if rng.random() < 0.7:
        requests = [msgspec.structs.replace(request, prompt_logprobs=None) for request in requests]
    harness, todo = World(*start()), requests[::-1]
    bad = rng.choice(["", "", rng.choice(requests).id])
    is_raised, blamed_from = rng.random() < 0.5, rng.randint(0, 20)
    for now in range(5000):
        while todo and rng.random() < 0.5:
            harness.add(todo.pop())
        if rng.random() < 0.03:
            harness.cancel(victim := rng.choice(requests).id)
            todo = [request for request in todo if request.id != victim]
        if now == blamed_from:
            raises, faulty.bad = (bad, "") if is_raised else ("", bad)
        if rng.random() < 0.01:
            harness.crash(*start())
        if harness.engine.has_work:
            report = harness.step()
            assert {failed.request_id for failed in report.failed} <= {bad}
        elif not todo:
            break
    harness.check_the_end()
    harness.counts["preemptions"] = harness.engine.scheduler.preemptions
    harness.counts["launched"] = harness.device.n_launched
    return harness.counts


def _raise(whether: bool) -> None:
    if whether:
        raise MemoryError


def _simulate_many(count: int, *, seed: int = 0) -> Counter[str]:
    return sum((_simulate(random.Random(seed + i)) for i in range(count)), Counter[str]())


@pytest.mark.parametrize("part", range(2))
def test_every_schedule_gives_every_request_what_it_gets_alone(part: int) -> None:
    """400 schedules with all that test_scheduler.py has, with launches that are refused or fail, and crashes."""
    counts = _simulate_many(200, seed=1000 * part)
    assert counts["preemptions"] > 20, "the harness was meant to run out of blocks"
    assert counts["launched"] > 2000, "the harness was meant to be ahead"
    assert counts["wasted"] > 20, "the harness was meant to end sequences that are in flight"


def test_the_simulation_notices_blocks_released_while_a_step_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    monkeypatch.setattr(StepsInFlight, "release", lambda self, blocks: self._pool.release(blocks))
    with pytest.raises(AssertionError, match="released while it is used"):
        _simulate_many(50)


def test_the_simulation_notices_rows_of_those_who_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    monkeypatch.setattr(Sequence, "ends_in_flight", property(lambda _self: False))
    with pytest.raises(AssertionError):
        _simulate_many(50)
