"""Times the phases of an engine's start.

starting --first phase--> loading weights --> ... --ready--> done. Other events of the engine
count towards the phase in which they arrive.
"""

from __future__ import annotations

from collections.abc import Mapping

STARTING = "starting"
"""The process, Python, and its imports."""
LOADING_WEIGHTS = "loading weights"
BUILDING_KERNELS = "building native kernels"
PLANNING_MEMORY = "planning memory"
WARMING_UP = "warming up"
CAPTURING_GRAPHS = "capturing graphs"
PROVING = "proving"
PHASES = (STARTING, LOADING_WEIGHTS, BUILDING_KERNELS, PLANNING_MEMORY, WARMING_UP, CAPTURING_GRAPHS, PROVING)


class StartupTimer:
    """Times one engine process, from the moment it is spawned."""

    def __init__(self, now: float) -> None:
        self._phase, self._since = STARTING, now
        self._seconds: dict[str, float] = {}

    def on_phase(self, name: str, now: float) -> None:
        """The engine reports a phase; times of a repeated phase are added up, unknown names are ignored."""
        if name in PHASES:
            self._close(now)
            self._phase = name

    def finish(self, now: float) -> dict[str, float]:
        """The engine is ready: returns the seconds of each phase, in order."""
        self._close(now)
        return self._seconds

    def _close(self, now: float) -> None:
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now


def format_phases(seconds: Mapping[str, float]) -> str:
    """Formats the total and the phases for the log."""
    parts = ", ".join(f"{phase} {took:.1f}" for phase, took in seconds.items())
    return f"{sum(seconds.values()):.1f} s: {parts}"
