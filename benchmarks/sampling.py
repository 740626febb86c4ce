"""Cost of sampling a token compared with computing it: `python -m benchmarks.sampling`.

Four ways to draw, each by an engine of its own in this process (real weights, no service, no pipe): greedy, plain
(temperature 0.8), with every filter, and with every filter, penalty, bias and log-probabilities at once. The engines
take their steps in turn, each turn in another order, so that a slow moment of the machine meets all; figures are
medians over rounds of the medians over steps. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from benchmarks.engine_alone import KERNELS, blocks_for, engine_alone
from benchmarks.result import Machine, this_machine
from model.checkpoint.checkpoint import Checkpoint, load
from model.command_line import OneLineParser
from model.device import choose_device, choose_dtype
from model.files import one_line

_BLOCK = 16
_FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "typical_p": 0.95, "top_p": 0.95, "min_p": 0.02}
WAYS = {
    "greedy": SamplingParams(temperature=0),
    "plain": SamplingParams(temperature=0.8),
    "filters": SamplingParams(**_FILTERS),
    "everything": SamplingParams(
        **_FILTERS,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.2,
        logit_bias=tuple((token, -1.0) for token in range(100, 110)),
        logprobs=5,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many rows, behind how long a text, and how often."""

    rows: tuple[int, ...] = (1, 8, 32)
    prompt: int = 200
    kernels: str = KERNELS[0]
    rounds: int = 7
    steps: int = 30
    """Of each way in a round."""


_QUICK = Sizes(rows=(1, 3), prompt=20, rounds=1, steps=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTimes:
    """One step of the engine, with so many rows."""

    rows: int
    greedy_ms: float
    plain_ms: float
    filters_ms: float
    everything_ms: float
    plain_percent: float
    """What it costs more than greedy: the median over the rounds."""
    filters_percent: float
    everything_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingResult:
    """All that was found."""

    date: str
    machine: Machine
    torch: str
    threads: int
    dtype: str
    kernels: str
    weights_version: str
    prompt: int
    rounds: int
    steps: int
    times: tuple[SamplingTimes, ...]


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.sampling", description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="weights directory (%(default)s)")
    parser.add_argument("--kernels", choices=KERNELS, default="native", help="what computes (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it works")
    flags = parser.parse_args(argv)
    sizes = replace(_QUICK if flags.quick else Sizes(), kernels=flags.kernels)
    try:
        result = measure(flags.weights, sizes)
    except ValueError as error:  # of weights or compiler: each names what it is about
        parser.exit(2, one_line(f"error: {error}") + "\n")
    print(msgspec.json.encode({"benchmark": "sampling", **msgspec.to_builtins(result)}).decode(), flush=True)
    return 0


def measure(weights: Path, sizes: Sizes) -> SamplingResult:
    """Prints each row as it is found."""
    device = choose_device("auto")
    dtype = choose_dtype("auto", device)
    checkpoint = load(weights, device=device, dtype=dtype)
    heads = "".join(f"{way:>12}" for way in WAYS)
    print(f"{'rows':>5}{heads}  ms a step")
    found = []
    for rows in sizes.rows:
        times = _times(checkpoint, rows, sizes)
        more = (times.plain_percent, times.filters_percent, times.everything_percent)
        steps = (times.greedy_ms, times.plain_ms, times.filters_ms, times.everything_ms)
        print(f"{rows:5}" + "".join(f"{ms:12.3f}" for ms in steps))
        print(f"{'':17}" + "".join(f"{percent:+10.1f} %" for percent in more), flush=True)
        found.append(times)
    return SamplingResult(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=this_machine(),
        torch=str(torch.__version__),
        threads=torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        kernels=sizes.kernels,
        weights_version=checkpoint.version,
        prompt=sizes.prompt,
        rounds=sizes.rounds,
        steps=sizes.steps,
        times=tuple(found),
    )


def _times(checkpoint: Checkpoint, rows: int, sizes: Sizes) -> SamplingTimes:
    rng = random.Random(rows)
    rounds: list[dict[str, float]] = []
    for _ in range(sizes.rounds):
        prompts = [tuple(rng.choices(range(checkpoint.decoder.config.vocab_size), k=sizes.prompt)) for _ in range(rows)]
        rounds.append(_round(checkpoint, prompts, sizes, rng))
    ms = {way: statistics.median(round_[way] for round_ in rounds) for way in WAYS}
    more = {way: statistics.median(100 * (round_[way] / round_["greedy"] - 1) for round_ in rounds) for way in WAYS}
    return SamplingTimes(
        rows=rows,
        greedy_ms=ms["greedy"],
        plain_ms=ms["plain"],
        filters_ms=ms["filters"],
        everything_ms=ms["everything"],
        plain_percent=more["plain"],
        filters_percent=more["filters"],
        everything_percent=more["everything"],
    )


def _round(
    checkpoint: Checkpoint, prompts: list[tuple[int, ...]], sizes: Sizes, rng: random.Random
) -> dict[str, float]:
    """Milliseconds of a step, for each way: the median."""
    engines = {way: _engine(checkpoint, prompts, sizes.steps + 3, way, sizes.kernels) for way in WAYS}
    spent: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(sizes.steps):
        for way in rng.sample(list(WAYS), len(WAYS)):
            start = time.perf_counter()
            report = engines[way].step()
            spent[way].append((time.perf_counter() - start) * 1000)
            assert len(report.events) == len(prompts), "a step was meant to continue every text"
    return {way: statistics.median(values) for way, values in spent.items()}


def _engine(checkpoint: Checkpoint, prompts: list[tuple[int, ...]], max_tokens: int, way: str, kernels: str) -> Engine:
    """An engine that has read its prompts, and so has only tokens to add. No token ends a text."""
    rows, length = len(prompts), len(prompts[0]) + max_tokens
    engine = engine_alone(
        checkpoint.decoder,
        kernels=kernels,
        blocks=blocks_for(rows, length),
        tokens_per_step=rows * length,
        max_running=rows,
    )
    for i, prompt in enumerate(prompts):
        params = msgspec.structs.replace(WAYS[way], seed=i)
        engine.add(Request(id=str(i), prompt=prompt, max_tokens=max_tokens, params=params))
    for _ in range(length):
        if len(engine.step().events) == rows:
            return engine
    raise AssertionError("the engine does not come to run every text at once")


if __name__ == "__main__":
    sys.exit(main())
