"""The requests of benchmarks.prefix: pairs that share a beginning, and windows with and without long prompts.

Prompts are random token ids, so that their lengths are exact and nothing is shared by chance.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import count
from random import Random

from benchmarks.completion import CompletionRequest, complete
from benchmarks.http_client import Address, Connection
from benchmarks.statistics import percentile
from benchmarks.timeline import Completed, Failed

_SHORT = 16
"""Tokens of the streams' own prompts."""
_TEMPERATURE = 0.8
_ANSWER = 8
"""Tokens of an answer whose first one counts: a token may be half a character, and show no text yet."""


class RequestFailed(RuntimeError):
    """A request did not do what it should; the message is the service's, or says what is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """What to measure. Raises ValueError, with a sentence for the user, if it cannot be carried out."""

    rounds: int = 9
    shared: int = 900
    tail: int = 8
    streams: int = 8
    tokens: int = 800
    prompt: int = 1000
    every_ms: float = 300.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Seconds to the first token of two prompts that begin alike."""

    cold: float
    shared: float
    cached: int
    """Tokens that the second one found in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Streams from their first request to their end. Seconds."""

    gaps: tuple[float, ...]
    """Ascending."""
    tokens_per_second: float
    first_tokens: tuple[float, ...]
    """Of the prompts that arrived."""

    def gap(self, percent: float) -> float:
        """A percentile of the gaps."""
        return percentile(self.gaps, percent)


async def drive(address: Address, plan: PrefixPlan, vocab: int) -> tuple[list[Pair], list[Window], list[Window]]:
    """Pairs, windows of streams alone, windows with concurrent prompts. Raises RequestFailed."""
    client = _Client(address, vocab)
    pairs, alone, beside = [], [], []
    for number in range(plan.rounds + 1):
        found = await _pair(client, plan), await _window(client, plan, False), await _window(client, plan, True)
        if number:  # the first round warms up
            pairs.append(found[0])
            alone.append(found[1])
            beside.append(found[2])
    return pairs, alone, beside


class _Client:
    """Every request has a connection and random numbers of its own; owned by one measurement."""

    def __init__(self, address: Address, vocab: int) -> None:
        self._address = address
        self._random = Random(0)
        self._vocab = vocab
        self._seeds = count()

    def ids(self, length: int) -> list[int]:
        """A prompt that was never there."""
        return self._random.choices(range(self._vocab), k=length)

    async def complete(self, prompt: list[int], tokens: int) -> Completed:
        """Raises RequestFailed."""
        connection = Connection(self._address)
        seed = next(self._seeds)
        request = CompletionRequest(prompt=prompt, max_tokens=tokens, temperature=_TEMPERATURE, seed=seed)
        try:
            outcome = await complete(connection, request)
        finally:
            connection.close()
        if isinstance(outcome, Failed):
            raise RequestFailed(outcome.message)
        if outcome.tokens != tokens:
            raise RequestFailed(f"asked for {tokens} tokens, the service gave {outcome.tokens}")
        return outcome

    async def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds, and how many tokens of the prompt were in the cache."""
        outcome = await self.complete(prompt, _ANSWER)
        if outcome.first_token is None:
            raise RequestFailed("an answer had no text")
        return outcome.first_token, outcome.cached


async def _pair(client: _Client, plan: PrefixPlan) -> Pair:
    prefix = client.ids(plan.shared)
    cold, _ = await client.first_token(prefix + client.ids(plan.tail))
    shared, cached = await client.first_token(prefix + client.ids(plan.tail))
    return Pair(cold=cold, shared=shared, cached=cached)


async def _window(client: _Client, plan: PrefixPlan, is_disturbed: bool) -> Window:
    began, ended = time.perf_counter(), asyncio.Event()

    async def streams() -> tuple[list[Completed], float]:
        works = [client.complete(client.ids(_SHORT), plan.tokens) for _ in range(plan.streams)]
        outcomes = await asyncio.gather(*works)
        ended.set()
        return outcomes, time.perf_counter() - began

    async def arrivals() -> list[float]:
        """One after the other, so that a slow service is not buried: at the soonest so long after the one before."""
        first_tokens: list[float] = []
        while is_disturbed and not ended.is_set():
            soonest = asyncio.create_task(asyncio.sleep(plan.every_ms / 1000))
            seconds, _ = await client.first_token(client.ids(plan.prompt))
            first_tokens.append(seconds)
            await soonest
        return first_tokens

    (outcomes, seconds), first_tokens = await asyncio.gather(streams(), arrivals())
    return Window(
        gaps=tuple(sorted(gap for outcome in outcomes for gap in outcome.gaps)),
        tokens_per_second=plan.streams * plan.tokens / seconds,
        first_tokens=tuple(first_tokens),
    )
