"""A value that a thread computes once, while the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class ThreadedResult(Generic[_T]):
    """A value that a thread computes when it is first needed, so that the event loop's other work goes on."""

    def __init__(self, compute: Callable[[], _T]) -> None:
        self._compute = compute
        self._computing: asyncio.Task[_T] | None = None

    async def get(self) -> _T:
        """The value. Raises what `compute` raised; the next call then tries again."""
        task = self._computing
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._computing = asyncio.create_task(asyncio.to_thread(self._compute))
        return await asyncio.shield(task)  # others may wait for it, too
