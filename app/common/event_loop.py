"""Event loop: uvloop if installed, a lazy timer, and long work in time slices of a millisecond."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvicorn

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to completion on a new event loop, as asyncio.run() does; the loop is uvloop's if installed."""
    # uvicorn picks uvloop if it is installed; without log_config=None it would also configure its loggers.
    new_loop = uvicorn.Config("", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=new_loop) as runner:
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
