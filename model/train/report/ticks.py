"""Where the marks of an axis stand, and what is written at them. Pure numbers; knows no drawing."""

from __future__ import annotations

import math
from itertools import pairwise

_MOST = 8
_FEWEST = 4
_MANTISSAS = (
    (1.0,),
    (1.0, 3.0),
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
)


def linear_ticks(low: float, high: float, most: int = _MOST) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], `most` at most."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (factor * power for factor in (1, 2, 5, 10, 20)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [i * step for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers within [low, high] of a logarithmic axis, as many as read well."""
    found: list[float] = []
    for mantissas in _MANTISSAS:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [m * 10.0**power for power in powers for m in mantissas if low <= m * 10.0**power <= high]
        found = ticks if len(ticks) <= _MOST else found
    return found if len(found) >= _FEWEST else linear_ticks(low, high)


def tick_label(value: float, ticks: list[float]) -> str:
    """The number with the digits that tell it from its neighbours, and k, M or G where it is large."""
    largest, gap = max(map(abs, ticks)), min((b - a for a, b in pairwise(ticks)), default=1.0)
    size, unit = next(((s, u) for s, u in ((1e9, " G"), (1e6, " M"), (1e3, " k")) if largest >= s), (1.0, ""))
    if value == 0:
        return "0"
    digits = max(0, -math.floor(math.log10(gap / size) + 1e-9))
    return f"{value / size:.{digits}f}{unit}"
