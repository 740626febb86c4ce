"""What a run tells of itself, how fast it is, and one line of both for people. Knows no weights and no files."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from model.train.common.formatting import duration, short

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
    """What is measured beside the training loss: "held-out" or "training" text."""
    bytes_per_target: float
    """Of the text, on average: makes bits per byte of nats per target."""
    rates: Mapping[str, float]
    """Full learning rates, by the names that the log gives them."""
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    """Of the device in a second; None where nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the run tells after each step of the optimiser."""

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
    """The same with what only a look back can tell."""

    progress: Progress
    loss: float
    """Smoothed over the last steps."""
    tokens_per_second: float
    """Of late; 0 where nothing can be told yet."""
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
        """None before it can be told."""
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
