"""The number of threads that an engine chooses by measurement."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.common.ipc import WorkerConfig
from app.engine.cpu.thread_count import BUDGET_SECONDS, choose_threads
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.startup import build_engine
from benchmarks.engine_driver import request, run_all
from tests.support.model.tiny_models import tiny_weights


class FakeMachine:
    """A fake machine whose steps take a given time for each number of threads, and advance a fake clock."""

    def __init__(self, seconds: Mapping[int, float], noise: Callable[[int], float] = lambda _: 0.0) -> None:
        self.seconds, self.noise = seconds, noise
        self.now, self.steps = 0.0, list[int]()

    def step(self, threads: int) -> float:
        took = self.seconds[threads] + self.noise(threads)
        self.now += took
        self.steps.append(threads)
        return took

    def choose(self, default: int, *candidates: int) -> tuple[int, str]:
        return choose_threads(self.step, default, candidates, clock=lambda: self.now)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({2: 1.0, 1: 1.8}, 2),
        ({2: 1.0, 1: 0.95}, 2),  # not decisive
        ({2: 1.0, 1: 0.7}, 1),
        ({8: 1.0, 1: 4.0, 4: 1.2, 16: 0.8}, 16),
        ({8: 1.0, 1: 0.85, 4: 0.6, 16: 2.0}, 4),
    ],
)
def test_clearly_fastest_candidate_is_chosen(seconds: dict[int, float], chosen: int) -> None:
    machine = FakeMachine({threads: each / 5000 for threads, each in seconds.items()})
    default, *candidates = seconds
    assert machine.choose(default, *candidates)[0] == chosen
    assert machine.now <= BUDGET_SECONDS * 1.2


def test_slow_candidate_costs_few_steps() -> None:
    machine = FakeMachine({64: 0.0001, 1: 0.0005})
    assert machine.choose(64, 1) == (64, "measured beside 64: 1 took 5.00 times as long")
    assert machine.steps.count(1) <= 4 and machine.now < 0.01


def test_long_steps_are_not_measured() -> None:
    machine = FakeMachine({2: 0.08, 1: 0.01})
    assert machine.choose(2, 1)[0] == 2 and machine.steps == [2, 2]


def test_brief_interference_does_not_decide() -> None:
    """In five of six steps two threads lose a core; the other steps show that they are faster."""
    steps = count()
    machine = FakeMachine({2: 0.0005, 1: 0.0008}, lambda threads: 0.001 * (threads == 2 and next(steps) % 6 > 0))
    chosen, reason = machine.choose(2, 1)
    assert chosen == 2 and "1 took 0.5" in reason


def test_random_stalls_do_not_decide() -> None:
    """Equal candidates, while another process takes a time slice in one of ten steps: the default stays."""
    for seed in range(200):
        rng = random.Random(seed)
        machine = FakeMachine({2: 0.0005, 1: 0.0005}, lambda _, rng=rng: 0.004 * (rng.random() < 0.1))  # type: ignore[misc]
        assert machine.choose(2, 1)[0] == 2


@pytest.mark.usefixtures("native_library", "one_thread")
def test_engine_uses_the_measured_thread_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def choose(time_step: Callable[[int], float], default: int, candidates: Sequence[int]) -> tuple[int, str]:
        assert (default, candidates) == (2, [1, 3]) and all(time_step(threads) > 0 for threads in (2, 1, 3))
        return 3, "a test"

    monkeypatch.setattr("app.engine.backends.choose_threads", choose)
    directory, phases = tiny_weights(tmp_path / "w"), list[str]()
    config = WorkerConfig(
        weights=str(directory), device="cpu", library=str(find_or_build()), threads=2, thread_candidates=(1, 3)
    )
    built = build_engine(config, phases.append)
    runner: Any = built.engine.runner
    assert runner.executor.session.pool.count == runner.sampler._pool.count == 3
    assert built.ready.device.endswith(", 3 threads")
    assert "computes with 3 threads (a test)" in phases
    alone = build_engine(replace(config, threads=1, thread_candidates=()))
    assert alone.ready.device.endswith(", 1 threads")
    texts = [run_all(each.engine, [request("r", [1, 2, 3], 20)]).tokens("r") for each in (built, alone)]
    assert texts[0] == texts[1] and len(texts[0]) > 1
