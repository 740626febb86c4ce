"""What the engine process shows of itself beside its reports: that it still loads, and where it hangs. No torch."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PATIENCE = 0.8
"""Of the silence after which the process is killed: where it hangs is written before that."""


class HangTrace:
    """Writes to a descriptor (standard error's) what every thread does when nobody has called alive() for long.

    It needs no GIL, so it also shows who holds it. Setting the timer anew starts a thread, so not every call does.
    """

    def __init__(self, silence_seconds: float, descriptor: int = 2) -> None:
        self._descriptor = descriptor
        self._seconds = silence_seconds * _PATIENCE
        self._next = 0.0

    def alive(self, now: float) -> None:
        """The loop goes round; any number of times a second."""
        if now >= self._next:
            self._next = now + self._seconds / 4
            faulthandler.dump_traceback_later(self._seconds, file=self._descriptor)


@contextmanager
def heartbeat(beat: Callable[[], None], seconds: float) -> Iterator[None]:
    """Calls `beat` from a thread of its own now and then, while something else takes its time."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(seconds):
            try:
                beat()
            except OSError:  # the pipe is closed: whoever writes next from the main thread says so
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
