"""Progress of a run: its state after a step, its rates, and one line of figures."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from model.train.reporting.console import duration, format_count

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
    """Peak FLOP/s of all devices of the run; None if unknown."""


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


class RateTracker:
    """Smoothed loss and speed of the last steps, and the time left at the pace since the start or resume."""

    def __init__(self, run_info: RunInfo) -> None:
        self._run_info = run_info
        self._first: Progress | None = None
        self._last: Progress | None = None
        self._rates: deque[float] = deque(maxlen=_RATE_STEPS)
        self.loss = math.nan
        """Exponential moving average of the loss."""

    def add(self, progress: Progress) -> None:
        """Adds a step."""
        if self._last is None:
            self._first, self.loss = progress, progress.loss
        else:
            elapsed = max(progress.seconds - self._last.seconds, 1e-9)
            self._rates.append((progress.tokens - self._last.tokens) / elapsed)
            self.loss = _DECAY * self.loss + (1 - _DECAY) * progress.loss
        self._last = progress

    @property
    def tokens_per_second(self) -> float:
        """Median rate of the last ten steps, so that a measurement among them is none; 0 after the first step."""
        return statistics.median(self._rates) if self._rates else 0.0

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None if the device's peak is unknown."""
        peak = self._run_info.peak_flops
        return self.tokens_per_second * self._run_info.flops_per_token / peak if peak else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time; None before it is known."""
        if self._first is None or self._last is None or self._last.fraction == self._first.fraction:
            return None
        pace = (self._last.seconds - self._first.seconds) / (self._last.fraction - self._first.fraction)
        return pace * max(0.0, 1 - self._last.fraction)


def progress_line(progress: Progress, rates: RateTracker, held_out: float | None) -> str:
    """Figures of a run, the most important ones first. held_out: the latest bits per byte, if any."""
    mfu, speed = rates.mfu, rates.tokens_per_second
    parts = [
        f"step {progress.step}",
        f"loss {rates.loss:.3f}",
        f"held-out {held_out:.3f}" if held_out is not None else "",
        f"{speed:.0f} tok/s" if speed else "",
        f"{duration(rates.seconds_left)} left",
        f"epoch {progress.epoch:.2f}",
        f"MFU {'n/a' if mfu is None else f'{100 * mfu:.0f} %'}" if speed else "",
        f"{format_count(progress.tokens)} tokens",
    ]
    return f"{100 * progress.fraction:.1f} % " + "  ".join(part for part in parts if part)
