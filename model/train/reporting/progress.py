"""Progress of a run: its metrics, a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from model.train.common.console import ERASE_LINE, duration, is_terminal, print_stdout, short

_WIDEST_BAR = 30
_NARROWEST_BAR = 5
_WINDOW_SECONDS = 60.0
_RATE_STEPS = 10
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
    """Speed of the last steps, and the time left at the pace of the last minute, which includes measurements."""

    def __init__(self) -> None:
        self._seen: deque[Progress] = deque()
        self._rates: deque[float] = deque(maxlen=_RATE_STEPS)
        self._loss, self._weight = 0.0, 0.0

    def add(self, progress: Progress) -> None:
        """Adds a step."""
        if self._seen:
            before = self._seen[-1]
            self._rates.append((progress.tokens - before.tokens) / max(progress.seconds - before.seconds, 1e-9))
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
        """Median rate of the last ten steps, so that a measurement among them is none; 0 after the first step."""
        return statistics.median(self._rates) if self._rates else 0.0

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


def bar_line(status: Status, width: int) -> tuple[str, str, str]:
    """Progress line for a terminal: (text left of the bar, bar, text right of it), at most `width` columns in total.

    Omits the least important figures first if the terminal is narrow.
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
    return percent[:width], "#" * done + "." * (columns - done), text


def _mfu(status: Status) -> str:
    return "n/a" if status.mfu is None else f"{100 * status.mfu:.0f} %"


_BLUE, _PLAIN = "\x1b[34m", "\x1b[0m"
_REDRAW_SECONDS = 0.1


class Console:
    """Context manager that shows progress: a bar on a terminal, plain lines elsewhere. Erases the bar on exit."""

    def __init__(self, *, every: float) -> None:
        """every: seconds between plain lines."""
        self._every, self._last_printed, self._last_drawn = every, time.monotonic(), 0.0
        self._newest: Status | None = None
        self._terminal = find_terminal()
        self._is_plain = self._terminal is None or not is_terminal(sys.stdout)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            self._write(self._terminal, ERASE_LINE)
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
        """Updates only the bar, at most ten times a second."""
        self._newest, now = status, time.monotonic()
        if self._terminal and now - self._last_drawn >= _REDRAW_SECONDS:
            self._last_drawn = now
            with contextlib.suppress(OSError, ValueError):  # the terminal was closed: the run continues
                left, bar, right = bar_line(status, os.get_terminal_size(self._terminal.fileno()).columns - 1)
                # The cursor stays at the start of the line: what a signal or C code prints goes there.
                self._write(self._terminal, f"{ERASE_LINE}{left}{_BLUE}{bar}{_PLAIN}{right}\r")

    def _write(self, terminal: TextIO, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            if _is_foreground(terminal):
                terminal.write(text)
                terminal.flush()


def find_terminal() -> TextIO | None:
    """The terminal to draw a bar on; None for plain lines: no terminal, TERM=dumb, or NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return None
    return next((stream for stream in (sys.stderr, sys.stdout) if is_terminal(stream)), None)


def _is_foreground(terminal: TextIO) -> bool:
    """Whether this process is in the terminal's foreground: a background run draws nothing."""
    try:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not our controlling terminal
        return True
