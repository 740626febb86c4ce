"""A share of the event loop's time."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeBudget:
    """A share of the event loop's time for work that no quota pays for, and a reserve for a few pieces at once."""

    def __init__(self, share: float, reserve_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`share` is between 0 and 1."""
        self._share, self._reserve, self._clock = share, reserve_seconds, clock
        self._left, self._updated = reserve_seconds, clock()

    @property
    def wait_seconds(self) -> float:
        """Time until work may begin; 0.0 is now."""
        return max(0.0, -self._earned() / self._share)

    def spend(self, seconds: float) -> None:
        """Takes the time of work that was done; it may exceed what is left."""
        self._left, self._updated = self._earned() - seconds, self._clock()

    def _earned(self) -> float:
        return min(self._reserve, self._left + self._share * (self._clock() - self._updated))
