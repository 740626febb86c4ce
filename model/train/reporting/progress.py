"""Progress of a run: its metrics, a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO, cast

from model.train.common.console import duration, print_stdout, short

_WIDEST_BAR = 30
_NARROWEST_BAR = 5
_WINDOW_SECONDS = 60.0
_DECAY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Constants of a run."""

    title: str
    """Short description of the model."""
    measured: str
    """Text that is evaluated besides the training loss: "held-out" or "training"."""
    bytes_per_target: float
    """Mean bytes of text per target; converts nats per target to bits per byte."""
    rates: Mapping[str, float]
    """Full learning rates by their names in the log."""
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    """Peak FLOP/s of the device; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of the run after each optimizer step."""

    step: int
    """Completed steps."""
    loss: float
    """Loss of this step's batch, in nats per target."""
    lr_factor: float
    """Fraction of the full learning rates."""
    grad_norm: float
    """Gradient norm before clipping."""
    tokens: int
    """Targets seen so far."""
    epoch: float
    fraction: float
    """Completed fraction of the run, from 0 to 1."""
    seconds: float
    """Training time so far, including the time before a resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Progress, with rates computed over earlier steps."""

    progress: Progress
    loss: float
    """Loss, smoothed over the last steps."""
    tokens_per_second: float
    """Recent rate; 0 before it is known."""
    mfu: float | None
    """Model FLOPs utilization; None if the device's peak is unknown."""
    held_out: float | None
    """Latest held-out bits per byte, if any."""
    seconds_left: float | None


class RateTracker:
    """Rates over the last minute, so that a slowdown shows quickly."""

    def __init__(self) -> None:
        self._seen: deque[Progress] = deque()
        self._loss, self._weight = 0.0, 0.0

    def add(self, progress: Progress) -> None:
        """Adds a step."""
        self._seen.append(progress)
        while len(self._seen) > 2 and progress.seconds - self._seen[1].seconds >= _WINDOW_SECONDS:
            self._seen.popleft()
        self._loss = _DECAY * self._loss + (1 - _DECAY) * progress.loss
        self._weight = _DECAY * self._weight + 1 - _DECAY

    @property
    def loss(self) -> float:
        """Exponential moving average of the loss."""
        return self._loss / self._weight

    @property
    def tokens_per_second(self) -> float:
        """Recent rate; 0 after the first step, which includes warm-up."""
        first, last = self._seen[0], self._seen[-1]
        return (last.tokens - first.tokens) / max(last.seconds - first.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time; None before it is known."""
        first, last = self._seen[0], self._seen[-1]
        done, seconds = last.fraction - first.fraction, last.seconds - first.seconds
        return seconds * max(0.0, 1 - last.fraction) / done if done > 0 else None


def plain_line(status: Status) -> str:
    """A complete progress line, for files and pipes."""
    p = status.progress
    held_out = "" if status.held_out is None else f" held-out {status.held_out:.4f}"
    speed = f" {status.tokens_per_second:.0f} tokens/s MFU {_mfu(status)}" if status.tokens_per_second else ""
    return (
        f"step {p.step} loss {status.loss:.4f}{held_out} tokens {short(p.tokens)} epoch {p.epoch:.2f}{speed}"
        f" {100 * p.fraction:.1f} % done, {duration(status.seconds_left)} left"
    )


def bar_line(status: Status, width: int, *, filled: str, empty: str) -> tuple[str, str, str]:
    """Progress line for a terminal: (text left of the bar, bar, text right of it), at most `width` columns in total.

    Omits the least important figures first if the terminal is narrow. filled, empty: one-column characters of the bar.
    """
    p, held_out = status.progress, status.held_out
    ranked = [  # in display order; figures with lower numbers are omitted first
        (5, f"step {p.step}"),
        (7, f"loss {status.loss:.3f}"),
        (6, "" if held_out is None else f"held-out {held_out:.3f}"),
        (4, f"{short(status.tokens_per_second)} tok/s" if status.tokens_per_second else ""),
        (2, f"MFU {_mfu(status)}" if status.tokens_per_second else ""),
        (1, f"epoch {p.epoch:.2f}"),
        (3, f"{duration(status.seconds_left)} left"),
    ]
    percent, parts = f"{100 * p.fraction:.1f} % ", [part for part in ranked if part[1]]
    while True:
        text = "".join(f"  {label}" for _, label in parts)
        free_columns = width - len(percent) - len(text)
        if free_columns >= _NARROWEST_BAR or not parts:
            break
        parts.remove(min(parts))
    columns = max(0, min(free_columns, _WIDEST_BAR)) // 5 * 5  # keeps the bar's width stable as figures change length
    done = math.floor(columns * p.fraction)
    return percent[:width], filled * done + empty * (columns - done), text


def _mfu(status: Status) -> str:
    return "n/a" if status.mfu is None else f"{100 * status.mfu:.0f} %"


# After each redraw the cursor is at the start of the line: text echoed by a signal or printed by C code goes there
# instead of after the line, and erasing to the end of the screen also removes what a narrower window has wrapped.

Draw = Callable[[int], tuple[str, str, str]]
"""Columns -> (left of the bar, the bar, right of it)."""

_ERASE = "\r\x1b[J"
_BLUE, _PLAIN = "\x1b[34m", "\x1b[0m"
_SECONDS = 0.1


class ProgressBar:
    """Context manager that draws a progress bar; output to the same terminal goes above it."""

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
                setattr(sys, name, cast(TextIO, _StreamAbove(stream, self)))
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()
        for name, stream in self._streams:
            setattr(sys, name, stream)
        self._streams.clear()

    def draw(self, line: Draw) -> None:
        """Redraws at most ten times a second, and never over an unfinished line of other output."""
        now = time.monotonic()
        if now - self._last < _SECONDS or self._line_is_open or not _is_foreground(self.terminal):
            return
        self._last = now
        try:
            width = os.get_terminal_size(self.terminal.fileno()).columns - 1
        except (OSError, ValueError):  # the terminal was closed: the run continues
            return
        left, bar, right = line(width)
        self._write(f"{_ERASE}{left}{_BLUE}{bar}{_PLAIN}{right}\r")
        self._is_drawn = True

    def erase(self) -> None:
        """Clears the line; the next draw() is not delayed."""
        if self._is_drawn and _is_foreground(self.terminal):
            self._write(_ERASE)
        self._is_drawn, self._last = False, 0.0

    def write_above(self, stream: TextIO, text: str) -> int:
        """Prints in place of the line; the next draw() puts it below."""
        self.erase()
        self._line_is_open = not text.endswith("\n") if text else self._line_is_open
        return stream.write(text)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.terminal.write(text)
            self.terminal.flush()


class _StreamAbove:
    """A stream whose writes go above the bar."""

    def __init__(self, stream: TextIO, bar: ProgressBar) -> None:
        self._stream, self._bar = stream, bar

    def write(self, text: str) -> int:
        return self._bar.write_above(self._stream, text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def find_terminal() -> TextIO | None:
    """The terminal to draw a bar on; None for plain lines: no terminal, TERM=dumb, or NO_COLOR is set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb":
        return None
    return next((stream for stream in (sys.stderr, sys.stdout) if _is_terminal(stream)), None)


def blocks(terminal: TextIO) -> tuple[str, str]:
    """(filled, empty) characters of a bar, as far as the terminal's encoding supports them."""
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


def _is_foreground(terminal: TextIO) -> bool:
    """Whether this process is in the terminal's foreground: a background run draws nothing."""
    if not hasattr(os, "tcgetpgrp"):
        return True
    try:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not our controlling terminal
        return True


class Console:
    """Context manager that shows progress as a bar or as plain lines, and erases the bar on exit."""

    def __init__(self, *, every: float) -> None:
        """every: seconds between plain lines."""
        self._every, self._last_printed = every, time.monotonic()
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
                print_stdout(plain_line(self._newest))

    def show(self, status: Status) -> None:
        """Shows the progress if an update is due; call after each step."""
        self.redraw(status)
        now = time.monotonic()
        if self._is_plain and now - self._last_printed >= self._every:
            self._last_printed = now
            print_stdout(plain_line(status))

    def redraw(self, status: Status) -> None:
        """Updates only the bar, with more information on a step already shown."""
        self._newest = status
        if self._bar:
            self._bar.draw(lambda width: bar_line(status, width, filled=self._filled, empty=self._empty))
