"""Summary statistics over many outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.timeline import Completed, Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Milliseconds; None where nothing was measured."""

    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What one concurrency level gave."""

    streams: int
    requests: int
    """Requests started."""
    completed: int
    errors: int
    unfinished: int
    """Requests that the time limit or Ctrl+C cut: no errors, and their tokens are counted nowhere."""
    first_error: str | None
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    """Tokens of completed requests over the whole level, ramp-down included; a lower bound where requests were cut."""
    requests_per_second: float
    first_token_ms: Spread
    inter_token_ms: Spread
    """Gaps between `token` events of all completed streams. An event may carry several tokens; nothing is weighted."""


def summarise(outcomes: Sequence[Completed | Failed], *, streams: int, started: int, seconds: float) -> Level:
    completed = [outcome for outcome in outcomes if isinstance(outcome, Completed)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    tokens = sum(outcome.tokens for outcome in completed)
    return Level(
        streams=streams,
        requests=started,
        completed=len(completed),
        errors=len(failures),
        unfinished=started - len(outcomes),
        first_error=failures[0].message if failures else None,
        seconds=seconds,
        output_tokens=tokens,
        output_tokens_per_second=tokens / seconds,
        requests_per_second=len(completed) / seconds,
        first_token_ms=_spread([c.first_token for c in completed if c.first_token is not None]),
        inter_token_ms=_spread([gap for c in completed for gap in c.gaps]),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, with linear interpolation between neighbours (numpy's default; Hyndman and Fan, type 7)."""
    if not ordered:
        raise ValueError("no values have no percentile")
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _spread(seconds: list[float]) -> Spread:
    if not seconds:
        return Spread(p50=None, p99=None)
    ordered = sorted(seconds)
    return Spread(p50=percentile(ordered, 50) * 1000, p99=percentile(ordered, 99) * 1000)
