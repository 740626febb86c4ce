"""Cost of sampling a token compared with computing it: `python -m benchmarks.sampling`.

Four sampling modes, each in an engine of its own in this process (real weights, no service, no pipe): greedy, plain
(temperature 0.8), with every filter, and with every filter, penalty, bias and log-probabilities at once. The engines
run their steps in turn, each time in another order, so that a slow moment of the machine affects all; figures are
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
from benchmarks.in_process_engine import KERNELS, blocks_for, build_in_process_engine
from benchmarks.machine_info import Machine, this_machine
from model.checkpoint.checkpoint import Checkpoint, load
from model.command_line import OneLineParser
from model.device import choose_device, choose_dtype
from model.files import one_line

_BLOCK = 16
_FILTERS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "typical_p": 0.95, "top_p": 0.95, "min_p": 0.02}
SAMPLING_MODES = {
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
    """Rows, context length and repetitions."""

    rows: tuple[int, ...] = (1, 8, 32)
    prompt: int = 200
    kernels: str = KERNELS[0]
    rounds: int = 7
    steps: int = 30
    """Steps of each mode per round."""


_QUICK = Sizes(rows=(1, 3), prompt=20, rounds=1, steps=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTimes:
    """Times of one engine step."""

    rows: int
    greedy_ms: float
    plain_ms: float
    filters_ms: float
    everything_ms: float
    plain_percent: float
    """Overhead over greedy: median over the rounds."""
    filters_percent: float
    everything_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingResult:
    """The whole result."""

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
    parser.add_argument("--kernels", choices=KERNELS, default="native", help="kernels (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few steps, as a smoke test")
    flags = parser.parse_args(argv)
    sizes = replace(_QUICK if flags.quick else Sizes(), kernels=flags.kernels)
    try:
        result = measure(flags.weights, sizes)
    except ValueError as error:  # of weights or compiler; the message names which
        parser.exit(2, one_line(f"error: {error}") + "\n")
    print(msgspec.json.encode({"benchmark": "sampling", **msgspec.to_builtins(result)}).decode(), flush=True)
    return 0


def measure(weights: Path, sizes: Sizes) -> SamplingResult:
    """Measures and prints each number of rows."""
    device = choose_device("auto")
    dtype = choose_dtype("auto", device)
    checkpoint = load(weights, device=device, dtype=dtype)
    heads = "".join(f"{mode:>12}" for mode in SAMPLING_MODES)
    print(f"{'rows':>5}{heads}  ms a step")
    results = []
    for rows in sizes.rows:
        times = _times(checkpoint, rows, sizes)
        overhead = (times.plain_percent, times.filters_percent, times.everything_percent)
        steps = (times.greedy_ms, times.plain_ms, times.filters_ms, times.everything_ms)
        print(f"{rows:5}" + "".join(f"{ms:12.3f}" for ms in steps))
        print(f"{'':17}" + "".join(f"{percent:+10.1f} %" for percent in overhead), flush=True)
        results.append(times)
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
        times=tuple(results),
    )


def _times(checkpoint: Checkpoint, rows: int, sizes: Sizes) -> SamplingTimes:
    rng = random.Random(rows)
    rounds: list[dict[str, float]] = []
    for _ in range(sizes.rounds):
        prompts = [tuple(rng.choices(range(checkpoint.decoder.config.vocab_size), k=sizes.prompt)) for _ in range(rows)]
        rounds.append(_round(checkpoint, prompts, sizes, rng))
    ms = {mode: statistics.median(round_[mode] for round_ in rounds) for mode in SAMPLING_MODES}
    overhead = {
        mode: statistics.median(100 * (round_[mode] / round_["greedy"] - 1) for round_ in rounds)
        for mode in SAMPLING_MODES
    }
    return SamplingTimes(
        rows=rows,
        greedy_ms=ms["greedy"],
        plain_ms=ms["plain"],
        filters_ms=ms["filters"],
        everything_ms=ms["everything"],
        plain_percent=overhead["plain"],
        filters_percent=overhead["filters"],
        everything_percent=overhead["everything"],
    )


def _round(
    checkpoint: Checkpoint, prompts: list[tuple[int, ...]], sizes: Sizes, rng: random.Random
) -> dict[str, float]:
    """Median milliseconds of a step, by mode."""
    engines = {mode: _engine(checkpoint, prompts, sizes.steps + 3, mode, sizes.kernels) for mode in SAMPLING_MODES}
    milliseconds: dict[str, list[float]] = {mode: [] for mode in SAMPLING_MODES}
    for _ in range(sizes.steps):
        for mode in rng.sample(list(SAMPLING_MODES), len(SAMPLING_MODES)):
            start = time.perf_counter()
            report = engines[mode].step()
            milliseconds[mode].append((time.perf_counter() - start) * 1000)
            assert len(report.events) == len(prompts), "a step did not continue every sequence"
    return {mode: statistics.median(values) for mode, values in milliseconds.items()}


def _engine(checkpoint: Checkpoint, prompts: list[tuple[int, ...]], max_tokens: int, mode: str, kernels: str) -> Engine:
    """An engine that has prefilled its prompts and only decodes from now on. No token ends a sequence."""
    rows, length = len(prompts), len(prompts[0]) + max_tokens
    engine = build_in_process_engine(
        checkpoint.decoder,
        kernels=kernels,
        blocks=blocks_for(rows, length),
        tokens_per_step=rows * length,
        max_running=rows,
    )
    for i, prompt in enumerate(prompts):
        params = msgspec.structs.replace(SAMPLING_MODES[mode], seed=i)
        engine.add(Request(id=str(i), prompt=prompt, max_tokens=max_tokens, params=params))
    for _ in range(length):
        if len(engine.step().events) == rows:
            return engine
    raise AssertionError("the engine does not run all sequences at once")


if __name__ == "__main__":
    sys.exit(main())
