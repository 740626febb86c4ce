"""Results and arguments of a stage. Standard library only, so that a machine without packages can import it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table."""

    what: str
    value: float | str
    unit: str = ""
    share: float | None = None
    """Of what the machine could do at most, by the roofs of the same run: 1 is all of it."""
    ok: bool | None = None
    """Whether a law holds; None where there is none to break."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a stage may know of the run it is a part of."""

    device: str
    """cuda, or cpu to try the script itself."""
    tiny: bool
    """Sizes that a CPU computes in moments: to see that it works, never for a figure."""
    weights: Path
    """The default model's."""
    folder: Path
    """For whatever a stage writes; empty when it begins."""
    subject: str = ""
    """Which model, for stages that are there once for each."""
    deadline: float = float("inf")
    """By time.monotonic(); a stage that is not done by then is killed soon after."""
    found: Mapping[str, float] | None = None
    """Numbers of the stages before, by `stage: what`."""

    @property
    def seconds_left(self) -> float:
        """Until the deadline; never below zero."""
        return max(0.0, self.deadline - time.monotonic())

    def roof(self, what: str) -> float | None:
        """A limit of the machine as stage `roofs` measured it; None where that did not come about."""
        return (self.found or {}).get(f"roofs: {what}")


class Unsupported(RuntimeError):
    """This engine, or this machine, does not have what is asked about: no failure of either."""
