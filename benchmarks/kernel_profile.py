"""Profile of a decode step by operation: `python -m benchmarks.kernel_profile [--shape C]`.

Native kernels, random weights, 200 tokens of context per row; medians over steps, summed over layers. The last line is
one JSON object.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from app.common.types import BatchPlan, Chunk, Request, SamplingParams
from app.common.types import Sequence as EngineSequence
from benchmarks.in_process_engine import native_compute
from benchmarks.machine_info import this_machine
from benchmarks.peers.shapes import SHAPES
from model.command_line import OneLineParser
from model.config import ModelConfig
from model.nn.transformer import Decoder
from model.presets import preset

_CONTEXT_TOKENS = 200
_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Microseconds of one step by kind of operation, summed over all layers."""

    rows: int
    step_us: float
    head_us: float
    operations_us: dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = OneLineParser(prog="python -m benchmarks.kernel_profile", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--shape", choices=("default", *SHAPES), default="default", help="shape of the decoder (%(default)s)"
    )
    parser.add_argument("--int8", action="store_true", help="use int8 weights")
    parser.add_argument("--steps", type=int, default=100, help="steps per median (%(default)s)")
    flags = parser.parse_args(argv)
    config = preset("small") if flags.shape == "default" else SHAPES[flags.shape]
    profiles = profile(config, steps=flags.steps, int8=flags.int8)
    _print_table(profiles)
    facts = {"benchmark": "operations", "shape": flags.shape, "int8": flags.int8, "machine": this_machine()}
    print(msgspec.json.encode({**facts, "profiles": profiles}).decode())
    return 0


def profile(config: ModelConfig, *, steps: int, int8: bool = False, rows: Sequence[int] = (1, 8, 32)) -> list[Profile]:
    """Measures in bfloat16."""
    decoder = Decoder(config).initialize(0).to(torch.bfloat16).requires_grad_(False)
    length = min(_CONTEXT_TOKENS, config.context - 1)
    compute = native_compute(decoder, max(rows) * (length // _BLOCK + 1), int8=int8)
    names = compute.program.names
    profiles = []
    for n_rows in rows:
        plan = BatchPlan(tuple(Chunk(_sequence(config, row, length), length, length + 1) for row in range(n_rows)))
        steps_us: list[float] = []
        heads_us: list[float] = []
        operations: list[array[float]] = []
        for _ in range(steps):
            compute.seconds = array("d", bytes(8 * len(names)))
            began = time.perf_counter()
            compute.run(plan)
            ran = time.perf_counter()
            compute.logits(range(n_rows))
            done = time.perf_counter()
            steps_us.append((done - began) * 1e6)
            heads_us.append((done - ran) * 1e6)
            operations.append(compute.seconds)
        medians = [statistics.median(each) for each in zip(*operations, strict=True)]
        by_name = dict.fromkeys(names, 0.0)
        for name, seconds in zip(names, medians, strict=True):
            by_name[name] += seconds * 1e6
        step_us, head_us = statistics.median(steps_us), statistics.median(heads_us)
        profiles.append(Profile(rows=n_rows, step_us=step_us, head_us=head_us, operations_us=by_name))
    return profiles


def _sequence(config: ModelConfig, row: int, length: int) -> EngineSequence:
    rng, n_blocks = random.Random(row), length // _BLOCK + 1
    tokens = [rng.randrange(config.vocab_size) for _ in range(length + 1)]
    request = Request(id=str(row), prompt=tuple(tokens), max_tokens=1, params=SamplingParams())
    return EngineSequence(
        request=request, tokens=tokens, arrival=row, blocks=list(range(row * n_blocks, (row + 1) * n_blocks))
    )


def _print_table(profiles: Sequence[Profile]) -> None:
    print(f"{'us a step':16}" + "".join(f"{f'{each.rows} rows':>12}" for each in profiles))
    for name in profiles[0].operations_us:
        print(f"{name:16}" + "".join(f"{each.operations_us[name]:12.1f}" for each in profiles))
    print(f"{'head':16}" + "".join(f"{each.head_us:12.1f}" for each in profiles))
    print(f"{'all':16}" + "".join(f"{each.step_us:12.1f}" for each in profiles))


if __name__ == "__main__":
    sys.exit(main())
