"""A timer that is set again and again, and mostly to later. asyncio only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class LazyTimer:
    """Rings at the latest when it is due, perhaps earlier: who hears it looks at the clock and sets it again.

    Set to later it keeps the timer it has: one for each token of a stream would cost as much as the token.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def set(self, due: float) -> None:
        """`due` in seconds of time.monotonic()."""
        if self._timer and self._due <= due:
            return
        self.cancel()
        self._due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._go_off)

    def cancel(self) -> None:
        """It does not ring; any number of times."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _go_off(self) -> None:
        self._timer = None
        self._ring()
