"""A timer of the event loop whose due time moves at little cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class LazyTimer:
    """Fires when it is due or earlier: the callback checks the clock, and sets the timer again if it fired too early.

    Moving the due time back keeps the running timer: a new one for each token would cost as much as the token.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def set(self, due: float) -> None:
        """Sets the due time, in seconds of time.monotonic()."""
        if self._timer and self._due <= due:
            return
        self.cancel()
        self._due = due
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due - time.monotonic()), self._fire)

    def cancel(self) -> None:
        """Stops the timer; idempotent."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        self._callback()
