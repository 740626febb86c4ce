"""Benefit of the prefix cache, and cost of long prompts for concurrent streams: `python -m benchmarks.prefix`.

Runs the real service with a context of 1,024 tokens (shape C of benchmarks/peers with random weights, or --weights):

- time to first token of a new prompt, and of one that shares its first 900 tokens with it, alternately
- gaps between the tokens of 8 streams alone, and while prompts of 1,000 tokens arrive one after the other, alternately

Prompts are random token ids, so that lengths are exact and nothing is shared by chance. Figures are measured at the
client; medians over pairs and windows. The last line of stdout is one JSON object. Exit status: 0; 1 if the service
does not start or a request fails.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from benchmarks.client import Address, Client, get
from benchmarks.common import command_line, percentile, print_result
from benchmarks.completions import Completed, CompletionRequest, Failed, complete
from benchmarks.service_process import ServiceStartError, running, serve_command
from benchmarks.shapes import find_model

_STREAM_PROMPT_TOKENS = 16
"""Tokens in the prompts of the streams."""
_TEMPERATURE = 0.8
_OUTPUT_TOKENS = 8
"""Tokens to generate where the first one is timed: a token may be half a character, and show no text yet."""


_FLAGS = {
    "rounds": "pairs, and windows of each kind",
    "shared": "tokens in the shared prefix",
    "tail": "tokens after the shared prefix",
    "streams": "concurrent streams",
    "tokens": "tokens per stream and window",
    "prompt": "tokens per arriving prompt",
    "every_ms": "milliseconds between arrivals",
}


class RequestFailed(RuntimeError):
    """A request failed or returned something else than requested; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    """What to measure. Raises ValueError with a message for the user if a value is invalid."""

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
    """Seconds to the first token of two prompts with a common prefix."""

    cold: float
    shared: float
    cached: int
    """Tokens of the second prompt that were in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One run of the streams, from their first request to their end. Seconds."""

    gaps: tuple[float, ...]
    """Ascending."""
    tokens_per_second: float
    first_tokens: tuple[float, ...]
    """Times to first token of the prompts that arrived."""

    def gap(self, percent: float) -> float:
        """A percentile of the gaps."""
        return percentile(self.gaps, percent)


async def run_rounds(address: Address, plan: PrefixPlan, vocab: int) -> tuple[list[Pair], list[Window], list[Window]]:
    """Returns pairs, windows of the streams alone, and windows with arriving prompts. Raises RequestFailed."""
    client = _PromptClient(address, vocab)
    rounds = [
        (
            await _measure_pair(client, plan),
            await _measure_window(client, plan, False),
            await _measure_window(client, plan, True),
        )
        for _ in range(plan.rounds + 1)
    ]
    pairs, alone, concurrent = zip(*rounds[1:], strict=True)  # the first round is the warm-up
    return list(pairs), list(alone), list(concurrent)


class _PromptClient:
    """Sends each request on a connection of its own, with new random tokens."""

    def __init__(self, address: Address, vocab: int) -> None:
        self._address = address
        self._random = Random(0)
        self._vocab = vocab
        self._seeds = count()

    def ids(self, length: int) -> list[int]:
        """A new random prompt."""
        return self._random.choices(range(self._vocab), k=length)

    async def complete(self, prompt: list[int], tokens: int) -> Completed:
        """Raises RequestFailed."""
        client, seed = Client(self._address), next(self._seeds)
        request = CompletionRequest(prompt=prompt, max_tokens=tokens, temperature=_TEMPERATURE, seed=seed)
        try:
            outcome = await complete(client, request)
        finally:
            client.close()
        if isinstance(outcome, Failed):
            raise RequestFailed(outcome.message)
        if outcome.tokens != tokens:
            raise RequestFailed(f"asked for {tokens} tokens, the service gave {outcome.tokens}")
        return outcome

    async def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many prompt tokens were cached."""
        outcome = await self.complete(prompt, _OUTPUT_TOKENS)
        if outcome.first_token is None:
            raise RequestFailed("a completion had no text")
        return outcome.first_token, outcome.cached


async def _measure_pair(client: _PromptClient, plan: PrefixPlan) -> Pair:
    prefix = client.ids(plan.shared)
    cold, _ = await client.first_token(prefix + client.ids(plan.tail))
    shared, cached = await client.first_token(prefix + client.ids(plan.tail))
    return Pair(cold=cold, shared=shared, cached=cached)


async def _measure_window(client: _PromptClient, plan: PrefixPlan, with_arrivals: bool) -> Window:
    began, ended = time.monotonic(), asyncio.Event()

    async def streams() -> tuple[list[Completed], float]:
        completions = [client.complete(client.ids(_STREAM_PROMPT_TOKENS), plan.tokens) for _ in range(plan.streams)]
        outcomes = await asyncio.gather(*completions)
        ended.set()
        return outcomes, time.monotonic() - began

    async def arrivals() -> list[float]:
        """Sends one prompt after the other, at most one every `every_ms`, so that a slow service is not overloaded."""
        first_tokens: list[float] = []
        while with_arrivals and not ended.is_set():
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheResult:
    """Prefix cache: milliseconds, medians over pairs."""

    pairs: int
    cold_ms: float
    cold_tokens_per_second: float
    """Prompt tokens per second until the first token."""
    shared_ms: float
    sooner: float
    """Median of the ratios within each pair."""
    cached_tokens: int
    """Fewest cached tokens of a second prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceResult:
    """Gaps between tokens, alone (`alone_`) and with arriving prompts (`beside_`): medians over windows."""

    windows: int
    alone_p50_ms: float
    alone_p99_ms: float
    beside_p50_ms: float
    beside_p99_ms: float
    p99_ratio: float
    """Median of the ratios of adjacent windows."""
    beside_most_ms: float
    alone_tokens_per_second: float
    beside_tokens_per_second: float
    """Tokens of the streams only, without the arriving prompts."""
    arrivals: int
    arrival_first_token_ms: float
    arrival_tokens_per_second: float
    """Prompt tokens per second of an arriving prompt until its first token."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_line("prefix", __doc__)
    add, default = parser.add_argument, PrefixPlan()
    add("--weights", type=Path, help="weights directory (shape C of benchmarks/peers, random weights)")
    add("--kernels", default="auto", help="kernels: auto, native or torch (%(default)s)")
    add("--prompt-tokens-beside", type=int, default=0, help="as of inkstream serve; 256: no limit (its default)")
    for name, what in _FLAGS.items():
        value = getattr(default, name)
        add(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"{what} (%(default)s)")
    flags = parser.parse_args(argv)
    try:
        plan = PrefixPlan(**{name: getattr(flags, name) for name in _FLAGS})
    except ValueError as error:
        parser.error(str(error))
    extra = ["--kernels", flags.kernels]
    if flags.prompt_tokens_beside:
        extra += ["--prompt-tokens-beside", str(flags.prompt_tokens_beside)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            weights = flags.weights or find_model("C", weights=Path("weights"), folder=Path(folder)).directory
            server, prefix_cache, interference = _measure(["--weights", weights.resolve(), *extra], plan)
    except (ServiceStartError, RequestFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _print_results(plan, prefix_cache, interference)
    settings = asdict(plan) | {"kernels": flags.kernels, "prompt_tokens_beside": flags.prompt_tokens_beside}
    print_result("prefix", server=server, settings=settings, sharing=prefix_cache, disturbance=interference)
    return 0


def summarize_prefix_cache(pairs: Sequence[Pair], prompt: int) -> PrefixCacheResult:
    """Summarizes at least one pair; `prompt` is the length of a prompt."""
    cold = statistics.median(pair.cold for pair in pairs)
    return PrefixCacheResult(
        pairs=len(pairs),
        cold_ms=cold * 1000,
        cold_tokens_per_second=prompt / cold,
        shared_ms=statistics.median(pair.shared for pair in pairs) * 1000,
        sooner=statistics.median(pair.cold / pair.shared for pair in pairs),
        cached_tokens=min(pair.cached for pair in pairs),
    )


def summarize_interference(alone: Sequence[Window], concurrent: Sequence[Window], prompt: int) -> InterferenceResult:
    """Summarizes equally many windows of both kinds; `prompt` is the length of an arriving prompt."""
    first = [seconds for window in concurrent for seconds in window.first_tokens]
    arrival = statistics.median(first)
    return InterferenceResult(
        windows=len(alone),
        alone_p50_ms=statistics.median(w.gap(50) for w in alone) * 1000,
        alone_p99_ms=statistics.median(w.gap(99) for w in alone) * 1000,
        beside_p50_ms=statistics.median(w.gap(50) for w in concurrent) * 1000,
        beside_p99_ms=statistics.median(w.gap(99) for w in concurrent) * 1000,
        p99_ratio=statistics.median(b.gap(99) / max(a.gap(99), 1e-6) for a, b in zip(alone, concurrent, strict=True)),
        beside_most_ms=statistics.median(w.gap(100) for w in concurrent) * 1000,
        alone_tokens_per_second=statistics.median(w.tokens_per_second for w in alone),
        beside_tokens_per_second=statistics.median(w.tokens_per_second for w in concurrent),
        arrivals=len(first),
        arrival_first_token_ms=arrival * 1000,
        arrival_tokens_per_second=prompt / arrival,
    )


def _measure(flags: Sequence[str | Path], plan: PrefixPlan) -> tuple[Any, PrefixCacheResult, InterferenceResult]:
    with running(serve_command(*flags)) as service:
        service.wait_for_route("/health/ready")
        (model,) = msgspec.json.decode(asyncio.run(get(service.address, "/v1/models")).body)["data"]
        pairs, alone, concurrent = asyncio.run(run_rounds(service.address, plan, model["n_vocab"]))
    return (
        model,
        summarize_prefix_cache(pairs, plan.shared + plan.tail),
        summarize_interference(alone, concurrent, plan.prompt),
    )


def _print_results(plan: PrefixPlan, cache: PrefixCacheResult, gaps: InterferenceResult) -> None:
    print(f"{plan.shared} tokens shared, {plan.tail} of their own; medians of {cache.pairs} pairs")
    print(f"  first token, new prompt     {cache.cold_ms:8.1f} ms  ({cache.cold_tokens_per_second:.0f} tokens/s)")
    print(f"  first token, shared prompt  {cache.shared_ms:8.1f} ms  ({cache.cached_tokens} tokens cached)")
    print(f"  sooner                      {cache.sooner:8.1f} x")
    print(f"{plan.streams} streams, gaps between tokens; medians of {gaps.windows} windows each")
    print("            p50 ms  p99 ms  most ms  tokens/s")
    print(f"  alone   {gaps.alone_p50_ms:8.2f}{gaps.alone_p99_ms:8.2f}{'-':>9}{gaps.alone_tokens_per_second:10.0f}")
    print(
        f"  beside  {gaps.beside_p50_ms:8.2f}{gaps.beside_p99_ms:8.2f}{gaps.beside_most_ms:9.2f}"
        f"{gaps.beside_tokens_per_second:10.0f}"
    )
    print(f"  p99, beside through alone   {gaps.p99_ratio:.2f} x")
    print(
        f"  first token of {gaps.arrivals} arriving prompts of {plan.prompt}: {gaps.arrival_first_token_ms:.1f} ms "
        f"({gaps.arrival_tokens_per_second:.0f} tokens/s)"
    )


if __name__ == "__main__":
    sys.exit(main())
