"""Learning-rate schedule, and how far a run has come. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

Shape = Literal["linear", "cosine", "constant"]
SHAPES: tuple[Shape, ...] = get_args(Shape)
_LONGEST_WARM_UP = 0.1
"""Of the run: one of eighty steps never came to its full rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Warm-up by steps, then a shape over the whole run.

    ```
    linear    /-------\\      constant until the last `warm_down` of the run, then straight to 0
    cosine    /--..__        half a cosine over the run, to 0
    constant  /----------    for runs of unknown length; an average of the weights (--ema) replaces the descent
    ```
    """

    shape: Shape
    warm_up: int
    """Steps until the rate is whole, in a run that is long enough: it is so after a tenth of any run."""
    warm_down: float
    """Share of the run, for linear."""

    def lr_factor(self, step: int, done: float) -> float:
        """Share of the full learning rate. done: how much of the run is done, in [0, 1]."""
        warm_up = min(1.0, max((step + 1) / max(self.warm_up, 1), done / _LONGEST_WARM_UP))
        match self.shape:
            case "cosine":
                return warm_up * 0.5 * (1.0 + math.cos(math.pi * done))
            case "constant":
                return warm_up
        warm_down = min(1.0, (1.0 - done) / self.warm_down) if self.warm_down else 1.0
        return warm_up * max(warm_down, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a run is to be: what is reached first ends it. One of them is given."""

    steps: int | None = None
    epochs: float | None = None
    tokens: int | None = None
    minutes: float | None = None

    def done(self, *, step: int, epochs: float, tokens: float, seconds: float) -> float:
        """How much of the run is done: the largest share of any limit given. Of what one step is, its share."""
        shares = [
            step / self.steps if self.steps else 0.0,
            epochs / self.epochs if self.epochs else 0.0,
            tokens / self.tokens if self.tokens else 0.0,
            seconds / (60 * self.minutes) if self.minutes else 0.0,
        ]
        return max(shares)

    def flags(self) -> dict[str, str]:
        """Flag -> value, of those that are given."""
        given = {
            "--steps": self.steps,
            "--epochs": self.epochs,
            "--tokens": self.tokens,
            "--max-minutes": self.minutes,
        }
        return {flag: str(value) for flag, value in given.items() if value is not None}
