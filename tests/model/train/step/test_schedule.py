"""Learning rates over a run, and the progress of a run, in hand-made numbers."""

from __future__ import annotations

import pytest

from model.train.step.schedule import Limits, Schedule


def _lr_factor(shape: str, step: int, done: float, *, warm_up: int = 10, warm_down: float = 0.4) -> float:
    schedule = Schedule(shape=shape, warm_up=warm_up, warm_down=warm_down)  # type: ignore[arg-type]
    return schedule.lr_factor(step, done)


@pytest.mark.parametrize("shape", ["linear", "cosine", "constant"])
def test_every_schedule_warms_up_by_steps_and_a_short_run_over_its_first_tenth(shape: str) -> None:
    assert [_lr_factor(shape, step, 0.0) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert _lr_factor(shape, 0, 0.0, warm_up=0) == 1.0
    if shape != "cosine":
        factors = [_lr_factor(shape, step, step / 80, warm_up=100) for step in (0, 4, 8, 9)]
        assert factors == [0.01, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("shape", "factors"), [("linear", [1, 1, 1, 0.5, 0]), ("cosine", [1, 0.5, 0.345, 0.0955, 0]), ("constant", [1] * 5)]
)
def test_each_schedule_has_its_shape(shape: str, factors: list[float]) -> None:
    found = [_lr_factor(shape, 99, done) for done in (0.0, 0.5, 0.6, 0.8, 1.0)]
    assert found == pytest.approx(factors, abs=1e-3)
    assert _lr_factor("linear", 99, 1.1) == 0.0, "a time limit may be exceeded by part of a step"
    assert (_lr_factor("linear", 99, 1.0, warm_down=0.0), _lr_factor("linear", 99, 0.25, warm_down=1.0)) == (1.0, 0.75)


def test_progress_is_measured_by_the_nearest_limit() -> None:
    seen = {"step": 30, "epochs": 0.5, "tokens": 900, "seconds": 90.0}
    alone = [Limits(steps=60), Limits(epochs=2.0), Limits(tokens=1000), Limits(minutes=2.0)]
    assert [limit.done(**seen) for limit in alone] == [0.5, 0.25, 0.9, 0.75]
    assert Limits(steps=60, epochs=2.0, tokens=10_000, minutes=60.0).done(**seen) == 0.5
    assert Limits(steps=60, minutes=2.0).flags() == {"--steps": "60", "--max-minutes": "2.0"}
