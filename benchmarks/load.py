"""Fixed-concurrency streaming load against POST /complete: `python -m benchmarks.load`, or `inkstream bench`.

Each level keeps N streams open, each on its own keep-alive connection: when one ends, its next request starts at once.
Figures are measured at the client: tokens are the usage in the `done` event, times are when events reach this process.

- time to first token: request sent -> first `token` event with text
- inter-token latency: gap between two `token` events. An event may carry several tokens; gaps are reported as measured,
  neither divided nor weighted

The last line of stdout is one JSON object. Exit status: 0; 1 if a request failed; 2 if the flags are invalid or no
server answers; 130 after Ctrl+C, with the results so far.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count, islice
from typing import Any

import msgspec

from app.common import event_loop
from benchmarks.client import Exchange, get, keep_busy
from benchmarks.common import Machine, Percentiles, json_line, now_text, percentiles_ms, this_machine
from benchmarks.completions import Completed, Failed, measure
from benchmarks.load_plan import LoadPlan, parse_options

_ANSWER_SECONDS = 5
TABLE_HEAD = (
    "streams  requests  errors  tokens/s  requests/s  first token p50/p99 ms  inter-token p50/p99 ms\n"
    "-------  --------  ------  --------  ----------  ----------------------  ----------------------"
)


_WARM_UP = -1
"""Prompt number of the warm-up, which no counted request uses."""


class UnreachableError(ConnectionError):
    """No HTTP server answers at the URL."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    console = _Console(json_only=options.json_only)
    try:
        result = event_loop.run(run(options.plan, on_result=console.show))
    except UnreachableError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if console.latest is not None:
            print(_last_line(replace(console.latest, interrupted=True)), flush=True)
        return 130
    print(_last_line(result), flush=True)
    return 1 if result.failed else 0


def _ignore(_: LoadResult) -> None:
    pass


async def run(plan: LoadPlan, *, on_result: Callable[[LoadResult], None] = _ignore) -> LoadResult:
    """Carries out the plan, and reports each result so far: at the start, then after each level, even a cut one.

    Raises UnreachableError if nothing answers at the plan's URL.
    """
    result = LoadResult(
        date=now_text(),
        url=plan.url,
        machine=this_machine(),
        server=await _fetch_models(plan),
        settings=_settings(plan),
    )
    on_result(result)
    await run_level(plan, iter([_WARM_UP]), LevelProgress(streams=1))  # if it fails, counted requests report why
    indices = count()
    for streams in plan.streams:
        progress = LevelProgress(streams=streams)
        try:
            await run_level(plan, islice(indices, plan.requests_for(streams)), progress)
        finally:
            result = replace(result, levels=(*result.levels, progress.result()))
            on_result(result)
    return result


@dataclass(slots=True, kw_only=True)
class _Console:
    """Prints a row for each new level, and keeps the result so far for Ctrl+C."""

    json_only: bool
    latest: LoadResult | None = None

    def show(self, result: LoadResult) -> None:
        self.latest = result
        if not self.json_only:
            print(table_row(result.levels[-1]) if result.levels else TABLE_HEAD, flush=True)


async def _fetch_models(plan: LoadPlan) -> Any:
    """Response of GET /v1/models, or None if it is not JSON. Raises UnreachableError if nothing answers."""
    exchange = None
    with suppress(TimeoutError):
        async with asyncio.timeout(_ANSWER_SECONDS):
            exchange = await get(plan.address, "/v1/models")
    if exchange is None:
        raise UnreachableError(f"nothing answers at {plan.url} within {_ANSWER_SECONDS} s")
    if exchange.error:
        raise UnreachableError(f"nothing answers at {plan.url}: {exchange.error}")
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(exchange.body)
    return None


def _settings(plan: LoadPlan) -> dict[str, Any]:
    """The plan as JSON settings: the number of prompts instead of their texts, and no API key."""
    settings = asdict(plan) | {"prompts": len(plan.prompts)}
    del settings["api_key"]
    return settings


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
        first_token_ms=percentiles_ms([c.first_token for c in completed if c.first_token is not None]),
        inter_token_ms=percentiles_ms([gap for c in completed for gap in c.gaps]),
    )


@dataclass(slots=True, kw_only=True)
class LevelProgress:
    """Progress of one level, readable at any moment."""

    streams: int
    started_at: float = field(default_factory=time.monotonic)
    started: int = 0
    outcomes: list[Completed | Failed] = field(default_factory=list)

    def result(self) -> LevelResult:
        seconds = time.monotonic() - self.started_at
        return summarize(self.outcomes, streams=self.streams, started=self.started, seconds=seconds)


async def run_level(plan: LoadPlan, indices: Iterator[int], progress: LevelProgress) -> None:
    """Sends the requests with these numbers. Requests that the time limit cuts count as started and have no outcome."""

    def exchanges() -> Iterator[Exchange]:
        for index in indices:
            progress.started += 1
            yield plan.request(index).exchange(plan.address)

    with suppress(TimeoutError):
        async with asyncio.timeout(plan.seconds):
            await keep_busy(
                plan.address,
                progress.streams,
                exchanges(),
                lambda exchange: progress.outcomes.append(measure(exchange)),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Result of a load run. Immutable: each finished level makes a new object."""

    date: str
    url: str
    machine: Machine
    server: Any
    """Response of GET /v1/models; None if it was not JSON."""
    settings: dict[str, Any]
    levels: tuple[LevelResult, ...] = ()
    interrupted: bool = False

    @property
    def failed(self) -> bool:
        """Whether any request failed, or a level ended without a completed request."""
        return any(level.errors or not level.completed for level in self.levels)


def table_row(level: LevelResult) -> str:
    first, inter = level.first_token_ms, level.inter_token_ms
    text = (
        f"{level.streams:7}  {level.requests:8}  {level.errors:6}  {level.output_tokens_per_second:8.1f}"
        f"  {level.requests_per_second:10.2f}  {first!s:>22}  {inter!s:>22}"
    )
    if level.unfinished:
        text += f"\n         {level.unfinished} unfinished when the level was stopped after {level.seconds:.1f} s"
    if level.first_error is not None:
        text += f"\n         first error: {level.first_error}"
    return text


def _last_line(result: LoadResult) -> str:
    return json_line("load", **msgspec.to_builtins(result))


if __name__ == "__main__":
    sys.exit(main())
