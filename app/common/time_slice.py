"""Long work on the event loop in slices of a millisecond."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

_SLICE_SECONDS = 0.001


async def _yield() -> None:
    await asyncio.sleep(0)


class TimeSlice:
    """Divides long work on the event loop into slices; a pause lets the loop run once, or awaits `pause`."""

    def __init__(self, pause: Callable[[], Awaitable[None]] = _yield) -> None:
        self._pause = pause
        self._started = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the slice has used up its time."""
        return time.monotonic() - self._started > _SLICE_SECONDS

    async def pause_if_due(self) -> None:
        """Await this between two pieces of work; it returns immediately until the slice is used up."""
        if self.is_due:
            await self._pause()
            self._started = time.monotonic()
