"""Learning rates over a run, and how far a run is, by hand-made numbers."""

from __future__ import annotations

import pytest

from model.train.step.schedule import Limits, Schedule


def _schedule(shape: str, *, warm_up: int = 10, warm_down: float = 0.4) -> Schedule:
    return Schedule(shape=shape, warm_up=warm_up, warm_down=warm_down)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", ["linear", "cosine", "constant"])
def test_every_schedule_warms_up_by_steps(shape: str) -> None:
    schedule = _schedule(shape)
    assert [schedule.lr_factor(step, 0.0) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert _schedule(shape, warm_up=0).lr_factor(0, 0.0) == 1.0


@pytest.mark.parametrize("shape", ["linear", "constant"])
def test_a_short_run_warms_up_over_its_first_tenth(shape: str) -> None:
    schedule = _schedule(shape, warm_up=100)
    assert [schedule.lr_factor(step, step / 80) for step in (0, 4, 8, 9)] == [0.01, 0.5, 1.0, 1.0]


def test_linear_is_whole_then_falls_straight_to_nothing() -> None:
    schedule = _schedule("linear")
    assert [schedule.lr_factor(99, done) for done in (0.0, 0.3, 0.6)] == [1.0, 1.0, 1.0]
    assert schedule.lr_factor(99, 0.8) == pytest.approx(0.5)
    assert [schedule.lr_factor(99, done) for done in (1.0, 1.1)] == [0.0, 0.0]
    assert _schedule("linear", warm_down=0.0).lr_factor(99, 1.0) == 1.0
    assert _schedule("linear", warm_down=1.0).lr_factor(99, 0.25) == 0.75


def test_cosine_is_half_in_the_middle_and_nothing_at_the_end() -> None:
    schedule = _schedule("cosine")
    assert schedule.lr_factor(99, 0.0) == 1.0
    assert schedule.lr_factor(99, 0.5) == pytest.approx(0.5)
    assert schedule.lr_factor(99, 1.0) == pytest.approx(0.0)
    assert schedule.lr_factor(99, 0.1) > 0.97


def test_constant_stays() -> None:
    assert {_schedule("constant").lr_factor(99, done) for done in (0.0, 0.5, 1.0)} == {1.0}


def test_the_limit_that_is_nearest_says_how_much_is_done() -> None:
    seen = {"step": 30, "epochs": 0.5, "tokens": 900, "seconds": 90.0}
    assert Limits(steps=60).done(**seen) == 0.5
    assert Limits(epochs=2.0).done(**seen) == 0.25
    assert Limits(tokens=1000).done(**seen) == 0.9
    assert Limits(minutes=2.0).done(**seen) == 0.75
    assert Limits(steps=60, epochs=2.0, tokens=10_000, minutes=60.0).done(**seen) == 0.5
    assert Limits(steps=60, minutes=2.0).flags() == {"--steps": "60", "--max-minutes": "2.0"}
