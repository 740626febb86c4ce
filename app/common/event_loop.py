"""Event loop: uvloop if installed, a lazy timer, long work in slices of a millisecond, in threads, within a budget."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

try:
    from uvloop import new_event_loop
except ImportError:  # it does not exist for Windows
    from asyncio import new_event_loop  # type: ignore[assignment]

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to completion on a new event loop, as asyncio.run() does; the loop is uvloop's if installed."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def on_signal(loop: asyncio.AbstractEventLoop, number: signal.Signals, callback: Callable[[], None]) -> None:
    """Makes the running loop call `callback` exactly once for each signal `number`.

    uvloop's own add_signal_handler() (0.23) calls twice for a signal that arrives while it handles another one: SIGTERM
    right after SIGHUP counted as two, and ended the service at once in 4 of 120 tries.
    """

    def handle(*_args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(callback)

    signal.signal(number, handle)


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
