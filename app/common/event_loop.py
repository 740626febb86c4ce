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
    """asyncio.run() on that loop."""
    # uvicorn knows which one is installed; without log_config=None it would set its loggers up besides.
    new_loop = uvicorn.Config("", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)


def on_signal(loop: asyncio.AbstractEventLoop, number: signal.Signals, act: Callable[[], None]) -> None:
    """Has the running loop call `act` once for each such signal.

    uvloop's own add_signal_handler() (0.23) calls twice for a signal that comes while it takes in another one: SIGTERM
    right behind SIGHUP was two, and ended the service at once in 4 of 120 tries.
    """

    def deliver(*_given: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left that could end
            loop.call_soon_threadsafe(act)

    signal.signal(number, deliver)


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
