"""Figures of a promise's test against their target and floor, recorded for RELIABILITY.md.

The floor fails the test, the target does not: RELIABILITY.md shows both.
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

RESULTS = Path(os.environ.get("PROMISES_RESULTS", ROOT / "build/promises"))

T = TypeVar("T")
_PAUSES = (1, 5, 15)
"""Seconds between measurements."""


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
    """How many things were tried: requests, faults, files."""
    size: str
    """"ci" or "full"."""
    test: str
    date: str
    machine: str = ""
    """Cores, CPU and Python; the report adds it."""

    def reaches(self, bound: float) -> bool:
        """Whether the figure is on the good side of a bound."""
        return self.value <= bound if self.better == "low" else self.value >= bound


def number_of(path: Path) -> str:
    """The promise that a file tests: R1 of test_r01_bounded_queue.py."""
    number = path.stem.split("_")[1]
    return f"{number[0].upper()}{int(number[1:])}"


class Promise:
    """The fixture `promise`: one for each test, of the promise that the name of its file begins with."""

    def __init__(self, test: str, *, full: bool) -> None:
        self.full = full
        self._test = test

    def size(self, ci: int, full: int) -> int:
        """How many times: `ci` in every run, `full` in `make promises`."""
        return full if self.full else ci

    def measured(self, measure: Callable[[], T], is_good: Callable[[T], bool]) -> T:
        """The first of at most four measurements that is good, else the last; at full size the only one.

        For figures that other jobs on the same cores can only make worse: one quiet moment shows the service's own
        figure, and a slow service is slow each time. Controls measure once. Other users of the machine may take half of
        it for some seconds: hence the pauses.
        """
        for pause in () if self.full else _PAUSES:
            if is_good(found := measure()):
                return found
            time.sleep(pause)
        return measure()

    def all_of(self, what: str, good: int, n: int) -> None:
        """`good` of `n` must be all of them."""
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
    ) -> None:
        floor = target if floor is None else floor
        assert n > 0, "nothing was tried"
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
        assert figure.reaches(floor), f"{promise}: {what} is {figure.value:g} {unit}, the floor is {floor:g}"

    at_most = partialmethod(_note, "low")
    """A figure that must be low. Fails above the floor, which is the target where none is given."""
    at_least = partialmethod(_note, "high")
    """A figure that must be high."""
