"""Signals that end a run: the first one saves, a second one ends the process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from model.train.reporting.console import print_stderr

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl+C, termination by another process, and a closed terminal."""


class Interrupted(RuntimeError):
    """A signal interrupted the run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class StopRequest:
    """Whether a signal asked the run to stop."""

    def __init__(self) -> None:
        self.number = 0
        """Number of the first signal; 0 before one arrived."""

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Records signals within the block. Signals that the parent process ignores stay ignored."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        handled = [number for number in _SIGNALS if before[number] is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self._remember)
        try:
            yield
        finally:
            for number in handled:
                signal.signal(number, before[number])

    def raise_if_stopped(self) -> None:
        """Raises Interrupted if a signal has arrived."""
        if self.number:
            raise Interrupted(self.number)

    def _remember(self, number: int, _frame: object) -> None:
        self.number = self.number or number
        # Only this signal: torchrun adds its own SIGTERM to a terminal's SIGINT, which is not a second request.
        signal.signal(number, signal.SIG_DFL)
        print_stderr("saving, then exiting; send the same signal again to exit immediately")
