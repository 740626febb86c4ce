"""The event loop on which the service and its load run: uvloop's where it exists, asyncio's own elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
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
