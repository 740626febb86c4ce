"""One concurrency level: N streams kept busy until requests or time run out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.completion import CompletionRequest, OpenAIRequest, complete
from benchmarks.http_client import Connection
from benchmarks.plan import LoadPlan
from benchmarks.statistics import Level, summarise
from benchmarks.timeline import Completed, Failed

_WARM_UP = -1
"""The prompt number of the warm-up, which no counted request has."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Mutable, owned by one level: what happened so far, readable at any moment."""

    streams: int
    began: float = field(default_factory=time.perf_counter)
    started: int = 0
    outcomes: list[Completed | Failed] = field(default_factory=list)

    def level(self) -> Level:
        seconds = time.perf_counter() - self.began
        return summarise(self.outcomes, streams=self.streams, started=self.started, seconds=seconds)


async def drive(plan: LoadPlan, indices: Iterator[int], tally: Tally) -> None:
    """Sends the requests of these numbers. What the time limit cuts stays started and without an outcome."""
    with suppress(TimeoutError):
        async with asyncio.timeout(plan.seconds), asyncio.TaskGroup() as group:
            for _ in range(tally.streams):
                group.create_task(_stream(plan, indices, tally))


async def warm_up(plan: LoadPlan) -> None:
    """One request that is not counted. Should it fail, the counted ones will say why."""
    await drive(plan, iter([_WARM_UP]), Tally(streams=1))


async def _stream(plan: LoadPlan, indices: Iterator[int], tally: Tally) -> None:
    """One request after the other on one connection; the streams of a level share the numbers."""
    connection = Connection(plan.address)
    try:
        for index in indices:
            tally.started += 1
            tally.outcomes.append(await complete(connection, _request(plan, index)))
    finally:
        connection.close()


def _request(plan: LoadPlan, index: int) -> CompletionRequest:
    kind = OpenAIRequest if plan.api == "openai" else CompletionRequest
    return kind(prompt=plan.prompt(index), max_tokens=plan.max_tokens, temperature=plan.temperature, seed=max(index, 0))
