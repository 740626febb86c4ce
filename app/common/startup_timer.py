"""Times the phases of an engine's start.

starting --first phase--> loading weights --> ... --ready--> done. Other events of the engine
count towards the phase in which they arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

STARTING = "starting"
"""The process, Python, and its imports."""
LOADING_WEIGHTS = "loading weights"
BUILDING_KERNELS = "building native kernels"
PLANNING_MEMORY = "planning memory"
WARMING_UP = "warming up"
CAPTURING_GRAPHS = "capturing graphs"
PROVING = "proving"
PHASES = (STARTING, LOADING_WEIGHTS, BUILDING_KERNELS, PLANNING_MEMORY, WARMING_UP, CAPTURING_GRAPHS, PROVING)


def phase_seconds(starts: Iterable[tuple[str, float]], end: float) -> dict[str, float]:
    """Seconds of each phase, in order, from (phase, start in seconds); a repeated phase is added up."""
    seconds: dict[str, float] = {}
    for (phase, start), (_, stop) in pairwise([*starts, ("", end)]):
        seconds[phase] = seconds.get(phase, 0.0) + stop - start
    return seconds


def format_phases(seconds: Mapping[str, float]) -> str:
    """Formats the total and the phases for the log."""
    parts = ", ".join(f"{phase} {took:.1f}" for phase, took in seconds.items())
    return f"{sum(seconds.values()):.1f} s: {parts}"
