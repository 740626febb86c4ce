"""Long work on the event loop in pieces, so that other streams are served between them. asyncio only."""

from __future__ import annotations

import asyncio
import time

_LONGEST = 0.001


class Breather:
    """Lets others have their turn when a piece of work has gone on for a while."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether others have waited long enough."""
        return time.monotonic() - self._since > _LONGEST

    async def breathe(self) -> None:
        """To be awaited between two pieces; costs next to nothing where little time has passed."""
        if self.is_due:
            await asyncio.sleep(0)
            self._since = time.monotonic()
