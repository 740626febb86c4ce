"""Progress of a run: what is measured, one line of it, the progress bar on a terminal, plain lines elsewhere."""

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

from model.train.common.console import duration, say, short

_WIDEST_BAR = 30
_NARROWEST_BAR = 5
_LOOK_BACK_SECONDS = 60.0
_KEPT = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What does not change while a run goes on."""

    title: str
    """The model in a few words."""
    measured: str
    """What is measured besides the training loss: "held-out" or "training" text."""
    bytes_per_target: float
    """Of the text, on average: makes bits per byte of nats per target."""
    rates: Mapping[str, float]
    """Full learning rates, by the names that the log gives them."""
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    """Peak FLOP/s of the device; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of the run after each optimizer step."""

    step: int
    """Steps done."""
    loss: float
    """Of this step's batch, in nats a target."""
    lr_factor: float
    """Share of the full learning rates."""
    grad_norm: float
    """Before clipping."""
    tokens: int
    """Targets seen so far."""
    epoch: float
    fraction: float
    """How much of the run is done, from 0 to 1."""
    seconds: float
    """Time spent so far, that before a resume too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Progress with rates that need earlier steps."""

    progress: Progress
    loss: float
    """Smoothed over the last steps."""
    tokens_per_second: float
    """Recent rate; 0 before it is known."""
    mfu: float | None
    """Share of the device's peak arithmetic; None where that is not known."""
    held_out: float | None
    """Bits per byte, where they were measured."""
    seconds_left: float | None


class Pace:
    """Looks back over the last minute, so that a machine that slows down shows at once."""

    def __init__(self) -> None:
        self._seen: deque[Progress] = deque()
        self._loss, self._weight = 0.0, 0.0

    def add(self, progress: Progress) -> None:
        """One more step."""
        self._seen.append(progress)
        while len(self._seen) > 2 and progress.seconds - self._seen[1].seconds >= _LOOK_BACK_SECONDS:
            self._seen.popleft()
        self._loss = _KEPT * self._loss + (1 - _KEPT) * progress.loss
        self._weight = _KEPT * self._weight + 1 - _KEPT

    @property
    def loss(self) -> float:
        """The mean of what came, recent steps counting most."""
        return self._loss / self._weight

    @property
    def tokens_per_second(self) -> float:
        """0 after the first step, which also warms up."""
        first, last = self._seen[0], self._seen[-1]
        return (last.tokens - first.tokens) / max(last.seconds - first.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """None before it is known."""
        first, last = self._seen[0], self._seen[-1]
        done, seconds = last.fraction - first.fraction, last.seconds - first.seconds
        return seconds * max(0.0, 1 - last.fraction) / done if done > 0 else None


def plain_line(status: Status) -> str:
    """For files and pipes: a whole line, which says everything."""
    p = status.progress
    held_out = "" if status.held_out is None else f" held-out {status.held_out:.4f}"
    speed = f" {status.tokens_per_second:.0f} tokens/s MFU {_mfu(status)}" if status.tokens_per_second else ""
    return (
        f"step {p.step} loss {status.loss:.4f}{held_out} tokens {short(p.tokens)} epoch {p.epoch:.2f}{speed}"
        f" {100 * p.fraction:.1f} % done, {duration(status.seconds_left)} left"
    )


def bar_line(status: Status, width: int, *, filled: str, empty: str) -> tuple[str, str, str]:
    """For a terminal: (what is left of the bar, the bar itself, what is right of it), `width` columns at most together.

    Where there is little room, the figures that matter least are left out first. filled, empty: what the bar is made
    of, a column each.
    """
    p, held_out = status.progress, status.held_out
    ranked = [  # by place in the line; the number says how early it goes
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
        text = "".join(f"  {words}" for _, words in parts)
        room = width - len(percent) - len(text)
        if room >= _NARROWEST_BAR or not parts:
            break
        parts.remove(min(parts))
    columns = max(0, min(room, _WIDEST_BAR)) // 5 * 5  # so that it does not jump with every figure's length
    done = math.floor(columns * p.fraction)
    return percent[:width], filled * done + empty * (columns - done), text


def _mfu(status: Status) -> str:
    return "n/a" if status.mfu is None else f"{100 * status.mfu:.0f} %"


# After each drawing the cursor stands at the line's start: what a signal echoes or C code prints lands there and not
# behind the line, and erasing from there to the screen's end also takes what a narrower window has wrapped.

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
        """Redraws at most ten times a second, and never over an unfinished line of other output."""
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
