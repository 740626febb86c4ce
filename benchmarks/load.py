"""Fixed-concurrency streaming load against POST /complete: `python -m benchmarks.load`, or `inkstream bench`.

Each level keeps N streams open, each on its own keep-alive connection: the moment one ends, its next request goes out.
Figures are a client's: tokens are those of the `done` event's usage, times those at which events reach this process.

- time to first token: request sent -> first `token` event with text
- inter-token latency: gap between two `token` events. An event may carry several tokens: gaps are reported as they
  are, divided by nothing and weighted by nothing

The last line of stdout is one JSON object. Exit status: 0; 1 if a request failed; 2 if the flags are wrong or nothing
answers; 130 after Ctrl+C, with what was found so far.
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
from benchmarks.http_body import ProtocolError
from benchmarks.http_client import Connection, explain
from benchmarks.level import Tally, drive, warm_up
from benchmarks.plan import LoadPlan, parse_options
from benchmarks.result import TABLE_HEAD, LoadResult, json_line, row, this_machine

_ANSWER_SECONDS = 5


class UnreachableError(ConnectionError):
    """No HTTP server answers at the URL."""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    screen = _Screen(json_only=options.json_only)
    try:
        result = event_loop.run(run(options.plan, watch=screen.show))
    except UnreachableError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if screen.latest is not None:
            print(json_line(replace(screen.latest, interrupted=True)), flush=True)
        return 130
    print(json_line(result), flush=True)
    return 1 if result.failed else 0


def _ignore(_: LoadResult) -> None:
    pass


async def run(plan: LoadPlan, *, watch: Callable[[LoadResult], None] = _ignore) -> LoadResult:
    """Carries out the plan. `watch` is given the result so far: at the start, then after each level, a cut one too.

    Raises UnreachableError if nothing answers at the plan's URL.
    """
    result = LoadResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        url=plan.url,
        machine=this_machine(),
        server=await _models(plan),
        settings=_settings(plan),
    )
    watch(result)
    await warm_up(plan)
    indices = count()
    for streams in plan.streams:
        tally = Tally(streams=streams)
        try:
            await drive(plan, islice(indices, plan.requests_for(streams)), tally)
        finally:
            result = replace(result, levels=(*result.levels, tally.level()))
            watch(result)
    return result


@dataclass(slots=True, kw_only=True)
class _Screen:
    """Mutable, owned by main: prints a row for each new level and keeps the result so far for Ctrl+C."""

    json_only: bool
    latest: LoadResult | None = None

    def show(self, result: LoadResult) -> None:
        self.latest = result
        if not self.json_only:
            print(row(result.levels[-1]) if result.levels else TABLE_HEAD, flush=True)


async def _models(plan: LoadPlan) -> Any:
    """The answer of GET /v1/models, None if it is not JSON; and the proof that something answers."""
    connection = Connection(plan.address)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await connection.open()
            response = await connection.request("GET", "/v1/models")
            body = await response.read_all()
    except TimeoutError as error:
        raise UnreachableError(f"nothing answers at {plan.url} within {_ANSWER_SECONDS} s") from error
    except (OSError, ProtocolError, UnicodeError) as error:
        raise UnreachableError(f"nothing answers at {plan.url}: {explain(error)}") from error
    finally:
        connection.close()
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(body)
    return None


def _settings(plan: LoadPlan) -> dict[str, Any]:
    """The plan, with the number of its prompts instead of their texts, and without its key."""
    settings = asdict(plan) | {"prompts": len(plan.prompts)}
    del settings["api_key"]
    return settings


if __name__ == "__main__":
    sys.exit(main())
