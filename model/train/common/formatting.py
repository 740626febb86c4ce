"""Figures for people: how long, how many. Pure functions."""

from __future__ import annotations

import math


def duration(seconds: float | None) -> str:
    """In the two units that matter."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    if round(seconds) < 60:
        return f"{round(seconds)}s"
    minutes = round(seconds / 60)
    return f"{minutes}m" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02}m"


def counted(number: float) -> str:
    """To its last digit below a million."""
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{round(number):,}"


def short(number: float) -> str:
    """In six columns at most, up to a billion."""
    if number < 1e4:
        return f"{number:.0f}"
    return f"{number / 1e3:.1f}k" if number < 1e6 else f"{number / 1e6:.2f}M"
