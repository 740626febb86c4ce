"""One question to all replicas at once: those that hang keep nobody's answer back. Knows no question and no answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from app.cluster.messages import Call, ReplicaLost, Replicas, Whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What came in time, in that order."""

    answers: list[Whole]
    silent: int
    """Replicas that are not known to be lost and said nothing; 0 where an answer was enough."""


async def ask_everyone(
    replicas: Replicas, call: Call, seconds: float, *, is_enough: Callable[[Whole], bool] = lambda _: False
) -> Heard:
    """The answers until one is enough, or the time is over; whoever is still at it is told that nobody waits."""
    asked: list[asyncio.Task[Whole]] = []
    answers: list[Whole] = []
    try:
        async with asyncio.timeout(seconds):
            asked = await replicas.ask_all(call)
            for coming in asyncio.as_completed(asked):
                try:
                    answers.append(await coming)
                except ReplicaLost:
                    continue
                if is_enough(answers[-1]):
                    return Heard(answers=answers, silent=0)
    except TimeoutError:
        pass
    finally:
        silent = sum(not task.done() for task in asked)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    return Heard(answers=answers, silent=silent)
