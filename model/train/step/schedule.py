"""Learning-rate schedule, and limits of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Shape = Literal["linear", "cosine", "constant"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
_MAX_WARM_UP = 0.1
"""Maximum fraction of the run: otherwise a run of eighty steps never reached its full rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Warm-up in steps, then a curve over the whole run.

    ```
    linear    /-------\\      constant until the last `warm_down` of the run, then straight to 0
    cosine    /--..__        half a cosine over the run, to 0
    constant  /----------    for runs of unknown length; an average of the weights (--ema) replaces the descent
    ```
    """

    shape: Shape
    warm_up: int
    """Steps until the full rate, but at most a tenth of the run."""
    warm_down: float
    """Fraction of the run, for linear."""

    def lr_factor(self, step: int, done: float) -> float:
        """Fraction of the full learning rate. done: completed fraction of the run, in [0, 1]."""
        warm_up = min(1.0, max((step + 1) / max(self.warm_up, 1), done / _MAX_WARM_UP))
        match self.shape:
            case "cosine":
                return warm_up * 0.5 * (1.0 + math.cos(math.pi * done))
            case "constant":
                return warm_up
        warm_down = min(1.0, (1.0 - done) / self.warm_down) if self.warm_down else 1.0
        return warm_up * max(warm_down, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a run, at least one: the first one reached ends it."""

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    minutes: float | None = None

    def done(self, *, step: int, epochs: float, tokens: float, seconds: float) -> float:
        """Completed fraction of the run: the largest over all limits. With the values of one step: its fraction."""
        reached = ((step, self.steps), (epochs, self.epochs), (tokens, self.tokens), (seconds / 60, self.minutes))
        return max(value / limit if limit else 0.0 for value, limit in reached)

    def flags(self) -> dict[str, str]:
        """Flag -> value, for all limits that are set."""
        values = (self.steps, self.epochs, self.tokens, self.minutes)
        given = zip(("--steps", "--epochs", "--tokens", "--max-minutes"), values, strict=True)
        return {flag: str(value) for flag, value in given if value is not None}
