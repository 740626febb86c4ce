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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import count, islice
from typing import Any

import msgspec

from app.common import event_loop
from benchmarks.concurrency import LevelProgress, LevelResult, run_level, warm_up
from benchmarks.http_client import Connection, ProtocolError, error_text
from benchmarks.load_plan import LoadPlan, parse_options
from benchmarks.machine_info import Machine, this_machine

_ANSWER_SECONDS = 5
TABLE_HEAD = (
    "streams  requests  errors  tokens/s  requests/s  first token p50/p99 ms  inter-token p50/p99 ms\n"
    "-------  --------  ------  --------  ----------  ----------------------  ----------------------"
)


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
            print(json_line(replace(console.latest, interrupted=True)), flush=True)
        return 130
    print(json_line(result), flush=True)
    return 1 if result.failed else 0


def _ignore(_: LoadResult) -> None:
    pass


async def run(plan: LoadPlan, *, on_result: Callable[[LoadResult], None] = _ignore) -> LoadResult:
    """Carries out the plan, and reports each result so far: at the start, then after each level, even a cut one.

    Raises UnreachableError if nothing answers at the plan's URL.
    """
    result = LoadResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        url=plan.url,
        machine=this_machine(),
        server=await _fetch_models(plan),
        settings=_settings(plan),
    )
    on_result(result)
    await warm_up(plan)
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
    connection = Connection(plan.address)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await connection.open()
            response = await connection.request("GET", "/v1/models")
            body = await response.read_all()
    except TimeoutError as error:
        raise UnreachableError(f"nothing answers at {plan.url} within {_ANSWER_SECONDS} s") from error
    except (OSError, ProtocolError, UnicodeError) as error:
        raise UnreachableError(f"nothing answers at {plan.url}: {error_text(error)}") from error
    finally:
        connection.close()
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(body)
    return None


def _settings(plan: LoadPlan) -> dict[str, Any]:
    """The plan as JSON settings: the number of prompts instead of their texts, and no API key."""
    settings = asdict(plan) | {"prompts": len(plan.prompts)}
    del settings["api_key"]
    return settings


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
        f"  {level.requests_per_second:10.2f}  {_pair(first.p50, first.p99):>22}  {_pair(inter.p50, inter.p99):>22}"
    )
    if level.unfinished:
        text += f"\n         {level.unfinished} unfinished when the level was stopped after {level.seconds:.1f} s"
    if level.first_error is not None:
        text += f"\n         first error: {level.first_error}"
    return text


def json_line(result: LoadResult) -> str:
    return msgspec.json.encode({"benchmark": "load", **msgspec.to_builtins(result)}).decode()


def _pair(p50: float | None, p99: float | None) -> str:
    return "- / -" if p50 is None or p99 is None else f"{p50:.2f} / {p99:.2f}"


if __name__ == "__main__":
    sys.exit(main())
