"""One concurrency level of a load: N streams kept busy until requests or time run out, and summary statistics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.completion_client import Completed, CompletionRequest, Failed, OpenAIRequest, complete
from benchmarks.http_client import Connection
from benchmarks.load_plan import LoadPlan

_WARM_UP = -1
"""Prompt number of the warm-up, which no counted request uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Milliseconds; None if nothing was measured."""

    p50: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelResult:
    """Results of one concurrency level."""

    streams: int
    requests: int
    """Requests started."""
    completed: int
    errors: int
    unfinished: int
    """Requests cut by the time limit or Ctrl+C. They are not errors, and their tokens are not counted."""
    first_error: str | None
    seconds: float
    output_tokens: int
    output_tokens_per_second: float
    """Tokens of completed requests over the whole level, ramp-down included; a lower bound if requests were cut."""
    requests_per_second: float
    first_token_ms: Percentiles
    inter_token_ms: Percentiles
    """Gaps between `token` events of completed streams. An event may carry several tokens; gaps are not weighted."""


def summarize(outcomes: Sequence[Completed | Failed], *, streams: int, started: int, seconds: float) -> LevelResult:
    completed = [outcome for outcome in outcomes if isinstance(outcome, Completed)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    tokens = sum(outcome.tokens for outcome in completed)
    return LevelResult(
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
        first_token_ms=_percentiles([c.first_token for c in completed if c.first_token is not None]),
        inter_token_ms=_percentiles([gap for c in completed for gap in c.gaps]),
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Percentile of ascending values, linearly interpolated (numpy's default; Hyndman and Fan, type 7)."""
    if not ordered:
        raise ValueError("no values have no percentile")
    index = (len(ordered) - 1) * percent / 100
    below = int(index)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (index - below)


def _percentiles(seconds: list[float]) -> Percentiles:
    if not seconds:
        return Percentiles(p50=None, p99=None)
    ordered = sorted(seconds)
    return Percentiles(p50=percentile(ordered, 50) * 1000, p99=percentile(ordered, 99) * 1000)


@dataclass(slots=True, kw_only=True)
class LevelProgress:
    """Progress of one level, readable at any moment."""

    streams: int
    started_at: float = field(default_factory=time.perf_counter)
    started: int = 0
    outcomes: list[Completed | Failed] = field(default_factory=list)

    def result(self) -> LevelResult:
        seconds = time.perf_counter() - self.started_at
        return summarize(self.outcomes, streams=self.streams, started=self.started, seconds=seconds)


async def run_level(plan: LoadPlan, indices: Iterator[int], progress: LevelProgress) -> None:
    """Sends the requests with these numbers. Requests that the time limit cuts count as started and have no outcome."""
    with suppress(TimeoutError):
        async with asyncio.timeout(plan.seconds), asyncio.TaskGroup() as group:
            for _ in range(progress.streams):
                group.create_task(_stream(plan, indices, progress))


async def warm_up(plan: LoadPlan) -> None:
    """Sends one uncounted request. If it fails, the counted requests report why."""
    await run_level(plan, iter([_WARM_UP]), LevelProgress(streams=1))


async def _stream(plan: LoadPlan, indices: Iterator[int], progress: LevelProgress) -> None:
    """Sends requests one after the other on one connection; all streams of a level draw from the same numbers."""
    connection = Connection(plan.address)
    try:
        for index in indices:
            progress.started += 1
            progress.outcomes.append(await complete(connection, _request(plan, index)))
    finally:
        connection.close()


def _request(plan: LoadPlan, index: int) -> CompletionRequest:
    kind = OpenAIRequest if plan.api == "openai" else CompletionRequest
    return kind(prompt=plan.prompt(index), max_tokens=plan.max_tokens, temperature=plan.temperature, seed=max(index, 0))
