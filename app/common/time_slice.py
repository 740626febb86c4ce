"""Long work on the event loop in slices of a millisecond, with a pause between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_LONGEST = 0.001


async def _yield() -> None:
    await asyncio.sleep(0)


class TimeSlice:
    """Tells when a slice is over, and pauses: until the loop has run once, or for what `pause` waits for."""

    def __init__(self, pause: Callable[[], Awaitable[None]] = _yield) -> None:
        self._pause = pause
        self._since = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the slice is over."""
        return time.monotonic() - self._since > _LONGEST

    async def breathe(self) -> None:
        """To be awaited between two pieces; costs next to nothing where little time has passed."""
        if self.is_due:
            await self._pause()
            self._since = time.monotonic()
