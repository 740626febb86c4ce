"""Micro-benchmark of the samplers, torch against native: `python -m benchmarks.sampler_micro`.

Rows of random logits, each with 200 prompt tokens and 64 generated tokens; both samplers alternate on the same rows.
Figures are microseconds per step, medians over the turns; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from ctypes import CDLL

import msgspec
import torch

from app.engine.cpu.sampler import NativeSampler
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.sampling.sampler import sample
from app.engine.sampling.sampler_io import SamplingInput
from benchmarks.sampling import SAMPLING_MODES
from model.command_line import OneLineParser

_PROMPT, _LENGTH = 200, 264


def main(argv: Sequence[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m benchmarks.sampler_micro", description=__doc__.partition("\n")[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 50257], help="vocabulary sizes (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows per step (%(default)s)")
    parser.add_argument("--turns", type=int, default=30, help="steps per median (%(default)s)")
    flags = parser.parse_args(argv)
    library = CDLL(str(find_or_build()))
    results = []
    print(f"{'vocab':>7}{'rows':>6}{'way':>12}{'torch':>10}{'native':>10}  us a step")
    for vocab in flags.vocab:
        native = NativeSampler(library, vocab)
        for n_rows in flags.rows:
            for mode in SAMPLING_MODES:
                torch_us, native_us = _times(native, mode, n_rows, flags.turns)
                print(f"{vocab:7}{n_rows:6}{mode:>12}{torch_us:10.1f}{native_us:10.1f}", flush=True)
                results.append(
                    {"vocab": vocab, "rows": n_rows, "way": mode, "torch_us": torch_us, "native_us": native_us}
                )
    print(
        msgspec.json.encode({"benchmark": "draw", "torch_threads": torch.get_num_threads(), "times": results}).decode()
    )
    return 0


def _times(native: NativeSampler, mode: str, n_rows: int, turns: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(n_rows)
    logits_SV = torch.randn(n_rows, native.vocab, generator=generator) * 3
    tokens = [array("q", torch.randint(native.vocab, (_LENGTH,), generator=generator).tolist()) for _ in range(n_rows)]
    params = [msgspec.structs.replace(SAMPLING_MODES[mode], seed=i) for i in range(n_rows)]
    rows = [SamplingInput(p, history, _PROMPT) for p, history in zip(params, tokens, strict=True)]
    by_torch, by_native = [], []
    for _ in range(turns):
        by_torch.append(_microseconds(lambda: sample(logits_SV, rows)))
        # The best of three, since the first call finds the caches full of the other sampler's data.
        by_native.append(min(_microseconds(lambda: native.sample(logits_SV, rows)) for _ in range(3)))
    return statistics.median(by_torch), statistics.median(by_native)


def _microseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


if __name__ == "__main__":
    sys.exit(main())
