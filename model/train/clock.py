"""Time within a run: how long it has learnt, and when something is due again. Knows no steps."""

from __future__ import annotations

import time


class Clock:
    """Seconds that a run has taken, those before a resume too."""

    def __init__(self, before: float) -> None:
        self._started = time.monotonic() - before

    @property
    def seconds(self) -> float:
        """Until now."""
        return time.monotonic() - self._started


class Interval:
    """Something to be done every so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.begin()

    def begin(self) -> None:
        """It has been done just now."""
        self._began = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether it is due again."""
        return time.monotonic() - self._began >= self._seconds
