"""Where a run's lines go: a bar on a terminal, plain lines at an interval elsewhere, both where one is redirected."""

from __future__ import annotations

import sys
import time

from model.train.common.console_messages import say
from model.train.reporting.progress import Status, bar_line, plain_line
from model.train.reporting.progress_bar import ProgressBar, blocks, find_terminal


class Console:
    """A context manager: what is drawn on a terminal is gone when it is left, however that happens."""

    def __init__(self, *, every: float) -> None:
        """every: seconds between plain lines."""
        self._every, self._said = every, time.monotonic()
        self._newest: Status | None = None
        terminal = find_terminal()
        self._bar = None if terminal is None else ProgressBar(terminal)
        self._filled, self._empty = ("#", ".") if terminal is None else blocks(terminal)
        self._is_plain = self._bar is None or not (sys.stdout and sys.stdout.isatty())

    def __enter__(self) -> Console:
        if self._bar:
            self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.__exit__()
            if self._newest:
                say(plain_line(self._newest))

    def show(self, status: Status) -> None:
        """How far the run is; called after each step, shown when it is time to."""
        self.redraw(status)
        now = time.monotonic()
        if self._is_plain and now - self._said >= self._every:
            self._said = now
            say(plain_line(status))

    def redraw(self, status: Status) -> None:
        """The bar alone: the step was shown, and more is known of it."""
        self._newest = status
        if self._bar:
            self._bar.draw(lambda width: bar_line(status, width, filled=self._filled, empty=self._empty))
