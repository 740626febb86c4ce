"""Watches the engine process: heartbeats while it loads, and stack traces when it hangs."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TRACE_FRACTION = 0.8
"""Fraction of the silence limit after which the stack traces are written, before the process is killed."""


class HangTrace:
    """Dumps the stacks of all threads to a file descriptor (stderr) if alive() is not called for too long.

    The dump does not need the GIL, so it also shows which thread holds it. Resetting the timer starts a thread, so
    alive() does not reset it at every call.
    """

    def __init__(self, silence_seconds: float, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._seconds = silence_seconds * _TRACE_FRACTION
        self._next = 0.0

    def alive(self, now: float) -> None:
        """Resets the timer; may be called any number of times a second."""
        if now >= self._next:
            self._next = now + self._seconds / 4
            faulthandler.dump_traceback_later(self._seconds, file=self._descriptor)


@contextmanager
def heartbeat(send_beat: Callable[[], None], seconds: float) -> Iterator[None]:
    """Calls `send_beat` every `seconds` from a background thread within the block."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(seconds):
            try:
                send_beat()
            except OSError:  # the pipe is closed: the main thread reports that on its next write
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
