"""How long a step takes by its number of rows: measured at start, corrected by the steps themselves.

Only ratios matter: whether eight rows take twice as long as one. A scale follows the steps at once (contexts grow,
other processes compute beside), and ratios follow more slowly: a disturbed measurement is forgotten after a few steps.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping

MOST_ROWS = 64
_MEASURED_ROWS = (1, 2, 4, 8, 16, 32)
_RUNS = 3
_MOST_SECONDS = 0.1
_SCALE_STEP, _RATIO_STEP = 0.2, 0.03
_MEASURED_WEIGHT = 3
"""Number of steps for which the measurement at start counts: other processes start at the same time."""
_MOST_CHANGE = 1.5
"""A step that takes this much longer or shorter than expected counts no more than that."""
_REACH = 0.75
"""Steps of up to 2 to this power as many rows learn from a step, the less the further they are."""
_NEIGHBORS = [
    [
        (other, weight)
        for other in range(1, MOST_ROWS + 1)
        if rows and (weight := 1 - abs(math.log2(other / rows)) / _REACH) > 0
    ]
    for rows in range(MOST_ROWS + 1)
]


class StepCosts:
    """Seconds of steps that decode, by their rows."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """measured: seconds by rows, of at least two numbers of rows; those between and beyond are interpolated."""
        assert len(measured) > 1 and min(measured.values()) > 0
        rows, base = sorted(measured), measured[min(measured)]
        self._ratios = [1.0]  # of 0 rows, which no step has
        for count in range(1, MOST_ROWS + 1):
            upper = min(max(1, bisect_left(rows, count)), len(rows) - 1)
            low, high = rows[upper - 1], rows[upper]
            slope = (measured[high] - measured[low]) / (high - low)
            # A larger step never counts as a cheaper one: a measurement may have been disturbed.
            self._ratios.append(max(self._ratios[-1], (measured[low] + slope * (count - low)) / base))
        self._scale = base
        self._n_observed = [0] * len(self._ratios)

    def __str__(self) -> str:
        """The costs of some steps."""
        of = ", ".join(f"{self._ratios[rows]:.2f} of {rows}" for rows in _MEASURED_ROWS[1:])
        return f"a step of one row takes {1e3 * self._scale:.3g} ms, and as many times that: {of} rows"

    def of(self, rows: int) -> float:
        """The cost of a step of 1 to MOST_ROWS rows, as a multiple of what a step of one row took at start."""
        return self._ratios[rows]

    def observe(self, rows: int, seconds: float) -> None:
        """Learns from a step."""
        if rows > MOST_ROWS:
            return
        change = seconds / (self._scale * self._ratios[rows])
        change = min(_MOST_CHANGE, max(1 / _MOST_CHANGE, change))
        self._scale *= change**_SCALE_STEP
        self._n_observed[rows] += 1
        step = max(_RATIO_STEP, 1 / (self._n_observed[rows] + _MEASURED_WEIGHT))
        for other, weight in _NEIGHBORS[rows]:
            self._ratios[other] *= change ** (step * weight)


def measure(run: Callable[[int], object], most_rows: int) -> StepCosts:
    """Measures steps; `run` computes one of so many rows. Stops early where they take long."""
    seconds: dict[int, float] = {}
    for rows in _MEASURED_ROWS:
        if rows > max(2, most_rows) or (len(seconds) > 1 and sum(seconds.values()) > _MOST_SECONDS):
            break
        times = []
        for _ in range(_RUNS):
            started = time.perf_counter()
            run(rows)
            times.append(time.perf_counter() - started)
            if sum(times) > _MOST_SECONDS / len(_MEASURED_ROWS):
                break
        seconds[rows] = max(min(times), 1e-9)
    return StepCosts(seconds)
