"""What the engine says about one request, as the event loop sees it. asyncio, no torch, no pipe."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from app.engine.errors import EngineError
from app.engine.types import Request, Started, TokenEvent


class Cancelled(EngineError):
    """The stream was ended from outside (DELETE /complete/{id})."""


Item = Started | TokenEvent | EngineError


class Stream:
    """Owned by the event loop. Closing it early is the only cancellation, and never waits.

    The buffer is bounded by the request itself: at most max_tokens events and one end.
    """

    def __init__(self, request: Request, drop: Callable[[str], None], position: Callable[[str], int | None]) -> None:
        self.request = request
        self._drop = drop
        self._position = position
        self._items: deque[tuple[float, Item]] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    @property
    def queue_position(self) -> int | None:
        """How many requests wait in front of this one; None once it runs."""
        return self._position(self.request.id)

    async def receive(self) -> list[tuple[float, Item]]:
        """Everything that has arrived, each with its time (monotonic seconds), at least one item.

        An error, or a TokenEvent with `finish`, is the last one.
        """
        await self._arrived.wait()
        self._arrived.clear()
        items = list(self._items)
        self._items.clear()
        return items

    def close(self) -> None:
        """Nobody listens any more: the engine drops the request. Closing twice, or after the end, is no error."""
        if not self._ended:
            self._ended = True
            self._drop(self.request.id)

    def cancel(self) -> None:
        """Ends the stream for its reader, too."""
        if not self._ended:
            self.push(Cancelled("the request was cancelled"))
            self.close()

    def push(self, item: Item) -> None:
        """Hands an item to the reader; the client's side."""
        if not self._ended:
            self._items.append((time.monotonic(), item))
            self._arrived.set()

    def end(self) -> None:
        """The last item has been pushed; the client's side."""
        self._ended = True
