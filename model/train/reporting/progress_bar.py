"""One line of a terminal, redrawn in place below whatever else is printed. Knows terminals and nothing of training.

After each drawing the cursor stands at the line's start: what a signal echoes or C code prints lands there and not
behind the line, and erasing from there to the screen's end also takes what a narrower window has wrapped.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, cast

Draw = Callable[[int], tuple[str, str, str]]
"""Columns -> (left of the bar, the bar, right of it)."""

_ERASE = "\r\x1b[J"
_BLUE, _PLAIN = "\x1b[34m", "\x1b[0m"
_SECONDS = 0.1


class ProgressBar:
    """A context manager: while it is entered, prints to the same terminal go above the line."""

    def __init__(self, terminal: TextIO) -> None:
        self.terminal = terminal
        self._streams: list[tuple[str, TextIO]] = []
        self._is_drawn, self._line_is_open, self._last = False, False, 0.0

    def __enter__(self) -> ProgressBar:
        for name in ("stdout", "stderr"):
            stream: TextIO | None = getattr(sys, name)
            if _is_terminal(stream):
                assert stream is not None
                self._streams.append((name, stream))
                setattr(sys, name, cast(TextIO, _Above(stream, self)))
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()
        for name, stream in self._streams:
            setattr(sys, name, stream)
        self._streams.clear()

    def draw(self, line: Draw) -> None:
        """Ten times a second at most, and never over an unfinished line of somebody else's."""
        now = time.monotonic()
        if now - self._last < _SECONDS or self._line_is_open or not _is_in_front(self.terminal):
            return
        self._last = now
        try:
            width = os.get_terminal_size(self.terminal.fileno()).columns - 1
        except (OSError, ValueError):  # the window is gone: the run goes on
            return
        left, bar, right = line(width)
        self._write(f"{_ERASE}{left}{_BLUE}{bar}{_PLAIN}{right}\r")
        self._is_drawn = True

    def erase(self) -> None:
        """Leaves the line empty; the next drawing comes at once."""
        if self._is_drawn and _is_in_front(self.terminal):
            self._write(_ERASE)
        self._is_drawn, self._last = False, 0.0

    def write_above(self, stream: TextIO, text: str) -> int:
        """Prints where the line stood; the next drawing puts it below."""
        self.erase()
        self._line_is_open = not text.endswith("\n") if text else self._line_is_open
        return stream.write(text)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.terminal.write(text)
            self.terminal.flush()


class _Above:
    """A stream whose writes go above the bar."""

    def __init__(self, stream: TextIO, bar: ProgressBar) -> None:
        self._stream, self._bar = stream, bar

    def write(self, text: str) -> int:
        return self._bar.write_above(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def find_terminal() -> TextIO | None:
    """Where a bar can be drawn; None where plain lines are better: no terminal, TERM=dumb, or NO_COLOR is set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return None
    return next((stream for stream in (sys.stderr, sys.stdout) if _is_terminal(stream)), None)


def blocks(terminal: TextIO) -> tuple[str, str]:
    """(filled, empty) columns of a bar, in what the terminal's encoding has."""
    try:
        "\u2588\u2591".encode(terminal.encoding or "ascii")
    except UnicodeError:
        return "#", "."
    return "\u2588", "\u2591"


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _is_in_front(terminal: TextIO) -> bool:
    """Whether the shell has left the terminal to us: a run that went on in the background draws nothing."""
    if not hasattr(os, "tcgetpgrp"):
        return True
    try:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not the terminal that we were started from
        return True
