"""A time budget is a reserve and a share of the time that passes."""

from __future__ import annotations

import pytest

from app.common.time_budget import TimeBudget


def test_budget_is_a_reserve_and_a_share_of_time() -> None:
    now = 100.0
    budget = TimeBudget(0.1, 0.5, lambda: now)
    budget.spend(0.5)
    assert budget.wait_seconds == 0.0
    budget.spend(0.2)
    assert budget.wait_seconds == pytest.approx(2.0)
    now += 1.5
    assert budget.wait_seconds == pytest.approx(0.5)
    now += 1e6
    budget.spend(0.6)
    assert budget.wait_seconds == pytest.approx(1.0), "the reserve does not grow with idle time"
