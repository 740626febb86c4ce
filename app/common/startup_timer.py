"""Times the phases of an engine's start.

starting --first phase--> loading weights --> ... --ready--> done. Other events of the engine
count towards the phase in which they arrive.
"""

from __future__ import annotations

from collections.abc import Mapping

STARTING = "starting"
"""The process, Python, and the import of torch."""
LOADING_WEIGHTS = "loading weights"
BUILDING_KERNELS = "building native kernels"
PLANNING_MEMORY = "planning memory"
WARMING_UP = "warming up"
CAPTURING_GRAPHS = "capturing graphs"
PROVING = "proving"
PHASES = (STARTING, LOADING_WEIGHTS, BUILDING_KERNELS, PLANNING_MEMORY, WARMING_UP, CAPTURING_GRAPHS, PROVING)


class StartupTimer:
    """Of one engine process, from the moment in which it was spawned."""

    def __init__(self, now: float) -> None:
        self._phase, self._since = STARTING, now
        self._seconds: dict[str, float] = {}

    def hear(self, words: str, now: float) -> None:
        """What the engine says it does; a phase that comes again is counted together."""
        if words in PHASES:
            self._close(now)
            self._phase = words

    def finish(self, now: float) -> dict[str, float]:
        """Seconds of each phase, in their order; the engine is ready."""
        self._close(now)
        return self._seconds

    def _close(self, now: float) -> None:
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now


def in_words(seconds: Mapping[str, float]) -> str:
    """For the log: the sum, and what it is made of."""
    parts = ", ".join(f"{phase} {took:.1f}" for phase, took in seconds.items())
    return f"{sum(seconds.values()):.1f} s: {parts}"
