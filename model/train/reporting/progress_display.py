"""Display of a run's progress line: redrawn behind a bar on a terminal, printed elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time

from tqdm import tqdm

from model.train.reporting.console import is_terminal, print_stdout

_REDRAW_SECONDS = 0.1


class ProgressDisplay:
    """Shows progress lines: behind a bar on a terminal, as plain lines elsewhere."""

    def __init__(self, *, every: float) -> None:
        """every: seconds between plain lines."""
        self._every, self._last_printed, self._last_drawn = every, time.monotonic(), 0.0
        self._terminal = next((stream for stream in (sys.stderr, sys.stdout) if is_terminal(stream)), None)
        self._is_plain = not is_terminal(sys.stdout)
        self._bar: tqdm | None = None

    def show(self, line: str, fraction: float) -> None:
        """Shows a line if an update is due. fraction: completed fraction of the run."""
        now = time.monotonic()
        if self._terminal and now - self._last_drawn >= _REDRAW_SECONDS:
            self._last_drawn = now
            with contextlib.suppress(OSError, ValueError):  # the terminal was closed: the run continues
                if _is_foreground(self._terminal.fileno()):
                    self._draw(line, fraction)
        if self._is_plain and now - self._last_printed >= self._every:
            self._last_printed = now
            print_stdout(line)

    def close(self, line: str) -> None:
        """Erases the bar and prints the last line instead."""
        if self._terminal:
            with contextlib.suppress(OSError, ValueError):
                if self._bar and _is_foreground(self._terminal.fileno()):
                    self._bar.close()
            print_stdout(line)

    def _draw(self, line: str, fraction: float) -> None:
        if self._bar is None:
            tqdm.monitor_interval = 0  # without its thread, which redraws bars that were not updated for long
            self._bar = tqdm(
                total=1.0,
                file=self._terminal,
                bar_format="[{bar:20}] {desc}",
                ascii=".#",
                dynamic_ncols=True,
                leave=False,
                delay=math.inf,  # only refresh() draws
            )
        self._bar.n = fraction
        self._bar.set_description_str(line, refresh=False)
        self._bar.refresh()


def _is_foreground(terminal: int) -> bool:
    """Whether this process is in the terminal's foreground; elsewhere a write may stop it (SIGTTOU, `stty tostop`)."""
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # not our controlling terminal
        return True
