"""Records measured figures of promises, with their targets and floors, for RELIABILITY.md.

A figure beyond its floor fails the test; one that misses only its target does not.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partialmethod
from pathlib import Path
from typing import Literal, TypeVar

from tests.support import ROOT
from tests.support.trials import Trials

RESULTS = Path(os.environ.get("PROMISES_RESULTS", ROOT / "build/promises"))

T = TypeVar("T")
_PAUSES = (1, 5, 15)
"""Seconds to wait between measurements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number of one test."""

    promise: str
    """R1 to R27, S1 to S24."""
    what: str
    value: float
    unit: str
    target: float
    floor: float
    better: Literal["low", "high"]
    n: int
    """Number of trials: requests, faults, files."""
    size: str
    """"ci" or "full"."""
    test: str
    date: str
    machine: str = ""
    """Cores, CPU and Python version; the report adds it."""

    def reaches(self, bound: float) -> bool:
        """Whether the figure meets a bound."""
        return self.value <= bound if self.better == "low" else self.value >= bound


def number_of(path: Path) -> str:
    """The promise that a file tests: "R1" for test_r01_bounded_queue.py."""
    number = path.stem.split("_")[1]
    return f"{number[0].upper()}{int(number[1:])}"


class Promise:
    """The fixture `promise`: records the figures of one test, for the promise in the name of its file."""

    def __init__(self, test: str, *, full: bool) -> None:
        self.full = full
        self._test = test

    def size(self, ci: int, full: int) -> int:
        """Number of repetitions: `full` in `make promises`, else `ci`."""
        return full if self.full else ci

    def measured(self, measure: Callable[[], T], is_good: Callable[[T], bool]) -> T:
        """Returns the first of at most four measurements that is good, else the last; at full size, measures once.

        For figures that other load on the machine can only worsen: one quiet moment shows the service's own figure, and
        a slow service is slow each time. Controls measure once. The pauses outlast other load of some seconds.
        """
        for pause in () if self.full else _PAUSES:
            if is_good(found := measure()):
                return found
            time.sleep(pause)
        return measure()

    def all_of(self, what: str, good: int | Trials, n: int = 0) -> None:
        """Requires that all `n` trials were good; a failure of Trials shows their first difference."""
        if isinstance(good, Trials):
            self.at_least(what, good.good, target=good.n, n=good.n, unit=f"of {good.n}", details=good.first_difference)
        else:
            self.at_least(what, good, target=n, n=n, unit=f"of {n}")

    def _note(
        self,
        better: Literal["low", "high"],
        what: str,
        value: float,
        *,
        target: float,
        floor: float | None = None,
        n: int,
        unit: str = "",
        details: str = "",
    ) -> None:
        floor = target if floor is None else floor
        assert n > 0, "no trials"
        promise = number_of(Path(self._test.partition("::")[0]))
        figure = Figure(
            promise=promise,
            what=what,
            value=float(f"{value:.4g}"),
            unit=unit,
            target=target,
            floor=floor,
            better=better,
            n=n,
            size="full" if self.full else "ci",
            test=self._test,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        RESULTS.mkdir(parents=True, exist_ok=True)
        name = "".join(c if c.isalnum() else "-" for c in f"{promise}-{what}")
        (RESULTS / f"{name}.json").write_text(json.dumps(asdict(figure), indent=1))
        message = f"{promise}: {what} is {figure.value:g} {unit}, the floor is {floor:g}"
        assert figure.reaches(floor), f"{message}\n{details}" if details else message

    at_most = partialmethod(_note, "low")
    """Records a figure that must be low. Fails above the floor, which defaults to the target."""
    at_least = partialmethod(_note, "high")
    """Records a figure that must be high. Fails below the floor, which defaults to the target."""
