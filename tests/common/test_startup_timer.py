"""Startup times of an engine by phase."""

from __future__ import annotations

from app.common.startup_timer import CAPTURING_GRAPHS, LOADING_WEIGHTS, PROVING, STARTING, format_phases, phase_seconds


def test_each_phase_ends_with_the_start_of_the_next() -> None:
    phases = (STARTING, 10.0), (LOADING_WEIGHTS, 12.0), (PROVING, 15.0), (CAPTURING_GRAPHS, 16.0), (PROVING, 18.0)
    seconds = phase_seconds(phases, 19.0)
    assert seconds == {STARTING: 2.0, LOADING_WEIGHTS: 3.0, PROVING: 2.0, CAPTURING_GRAPHS: 2.0}
    assert format_phases(seconds).startswith("9.0 s: starting 2.0, loading weights 3.0, proving 2.0")
    assert phase_seconds([(STARTING, 1.0)], 4.0) == {STARTING: 3.0}, "an engine that names no phase"
