"""Measures how fast this GPU reads, copies and multiplies: the roofline of all other figures. On random numbers.

Zeros draw less power and come out faster than any model's numbers would.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.finding import Bench, Finding

_GB, _TERA = 1e9, 1e12


_FORMATS = {"bf16": torch.bfloat16, "f32": torch.float32}


def run(bench: Bench) -> Iterator[Finding]:
    """Bandwidth in bytes a second, products in operations a second."""
    clock = Clock(bench.device)
    device = torch.device(bench.device)
    yield from _bandwidths(1 << 16 if bench.tiny else 1 << 31, clock, device)
    side = 64 if bench.tiny else 8192
    for name, dtype in _FORMATS.items():
        yield _product(name, dtype, side, clock, device)


def _bandwidths(numbers: int, clock: Clock, device: torch.device) -> Iterator[Finding]:
    """Over 4 GiB of bfloat16, where nothing is tiny: far beyond every cache."""
    x_N = torch.empty(numbers, dtype=torch.bfloat16, device=device).normal_()
    y_N = torch.empty_like(x_N)
    size = 2.0 * numbers
    copied = 2 * size / clock.median(lambda: y_N.copy_(x_N))
    yield _bandwidth("copy", copied, "read + written")
    words_N = x_N.view(torch.int32)
    read = size / clock.median(lambda: words_N.max())
    yield _bandwidth("read", read, "largest of int32")
    yield _bandwidth("most", max(copied, read), "the roof of whatever reads")


def _bandwidth(what: str, bytes_per_second: float, note: str) -> Finding:
    return Finding(what=f"{what} bytes/s", value=bytes_per_second, note=f"{bytes_per_second / _GB:,.0f} GB/s, {note}")


def _product(name: str, dtype: torch.dtype, side: int, clock: Clock, device: torch.device) -> Finding:
    """Three pairs in turn, so that none lies in a cache from the time before."""
    pairs = [[torch.empty(side, side, device=device, dtype=dtype).normal_() for _ in range(2)] for _ in range(3)]
    out_NN = torch.empty(side, side, device=device, dtype=dtype)

    def multiply() -> None:
        for a_NN, b_NN in pairs:
            torch.mm(a_NN, b_NN, out=out_NN)

    rate = 2.0 * side**3 * len(pairs) / clock.median(multiply)
    return Finding(what=f"{name} operations/s", value=rate, note=f"{rate / _TERA:,.1f} TFLOP/s, {side} x {side}")
