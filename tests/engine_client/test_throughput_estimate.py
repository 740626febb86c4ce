"""The estimate of the throughput counts only time with a backlog."""

from __future__ import annotations

import pytest

from app.engine_client.throughput_estimate import ThroughputEstimate


def test_idle_time_and_starts_without_a_queue_are_ignored() -> None:
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
