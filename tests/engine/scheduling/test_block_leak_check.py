"""Block leak check in production: violations are counted and logged, never raised, at negligible cost."""

from __future__ import annotations

import time

import pytest

from app.common.types import Request
from app.engine.execution.engine import Engine
from app.engine.scheduling.scheduler import BlockLeakCheck, Scheduler
from tests.support.engine.scheduler_simulation import SimulatedDevice, make_scheduler


def _running() -> tuple[Scheduler, Engine]:
    scheduler = make_scheduler(16, 4, 64, 4)
    engine = Engine(scheduler, SimulatedDevice(4))
    engine.add(Request(id="r", prompt=(1, 2, 3), max_tokens=3))
    engine.step()
    return scheduler, engine


def test_sound_blocks_are_not_counted() -> None:
    scheduler, engine = _running()
    while engine.has_work:
        engine.step()
    engine.on_idle()
    assert scheduler.counters.block_violations == 0


def test_a_lost_block_is_counted_and_logged_once_for_each_look(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, engine = _running()
    scheduler.running[0].blocks = []
    engine.on_idle()
    assert scheduler.counters.block_violations == 1
    assert "references, 0 owners" in caplog.text
    engine.on_idle()
    assert scheduler.counters.block_violations == 1, "nothing was done since"


@pytest.mark.parametrize(("blocks", "steps"), [(16, 1000), (100_000, 10_000)])
def test_it_looks_every_so_many_steps(blocks: int, steps: int) -> None:
    scheduler = make_scheduler(blocks, 4, 64, 4)
    audit = BlockLeakCheck(scheduler)
    scheduler.pool.allocate(1)  # a leaked block
    for _ in range(steps - 1):
        audit.after_step()
    assert scheduler.block_violations == 0
    audit.after_step()
    assert scheduler.block_violations == 1


def test_a_look_takes_less_than_a_microsecond_for_each_step() -> None:
    """Of the 120 that a step of the default model takes with one stream; measured 0.6, allowed five times as much."""
    scheduler = make_scheduler(20_000, 4, 64, 4)
    audit, seconds = BlockLeakCheck(scheduler), list[float]()
    for _ in range(5):
        start = time.process_time()
        for _ in range(2000):
            audit.after_step()
        seconds.append(time.process_time() - start)
    assert min(seconds) / 2000 < 3e-6
