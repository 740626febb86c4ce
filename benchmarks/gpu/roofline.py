"""Roofline of this GPU: measured peaks of reading, copying and multiplying, and the least time of a step by them.

Measures on random numbers, since zeros draw less power and come out faster than a model's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.results import Finding, StageContext
from benchmarks.gpu.timing import DeviceTimer
from benchmarks.roofline import ModelSize, size_of, work_of
from model.config import ModelConfig

_GB, _TERA = 1e9, 1e12
_FORMATS = {"bf16": torch.bfloat16, "f32": torch.float32}


def run(context: StageContext) -> Iterator[Finding]:
    """Bandwidth in bytes per second, products in operations per second."""
    timer = DeviceTimer(context.device)
    device = torch.device(context.device)
    yield from _bandwidths(1 << 16 if context.tiny else 1 << 31, timer, device)
    side = 64 if context.tiny else 8192
    for name, dtype in _FORMATS.items():
        yield _product(name, dtype, side, timer, device)


def _bandwidths(numbers: int, timer: DeviceTimer, device: torch.device) -> Iterator[Finding]:
    """Over 4 GiB of bfloat16 (unless tiny): far more than any cache."""
    x_N = torch.empty(numbers, dtype=torch.bfloat16, device=device).normal_()
    y_N = torch.empty_like(x_N)
    size = 2.0 * numbers
    copied = 2 * size / timer.median(lambda: y_N.copy_(x_N))
    yield _bandwidth("copy", copied, "read + written")
    words_N = x_N.view(torch.int32)
    read = size / timer.median(lambda: words_N.max())
    yield _bandwidth("read", read, "largest of int32")
    yield _bandwidth("most", max(copied, read), "the roof of whatever reads")


def _bandwidth(what: str, bytes_per_second: float, note: str) -> Finding:
    return Finding(what=f"{what} bytes/s", value=bytes_per_second, note=f"{bytes_per_second / _GB:,.0f} GB/s, {note}")


def _product(name: str, dtype: torch.dtype, side: int, timer: DeviceTimer, device: torch.device) -> Finding:
    """Three pairs in turn, so that none is still in a cache."""
    pairs = [[torch.empty(side, side, device=device, dtype=dtype).normal_() for _ in range(2)] for _ in range(3)]
    out_NN = torch.empty(side, side, device=device, dtype=dtype)

    def multiply() -> None:
        for a_NN, b_NN in pairs:
            torch.mm(a_NN, b_NN, out=out_NN)

    rate = 2.0 * side**3 * len(pairs) / timer.median(multiply)
    return Finding(what=f"{name} operations/s", value=rate, note=f"{rate / _TERA:,.1f} TFLOP/s, {side} x {side}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Roofline of one model on one machine; without peaks if stage `roofs` did not measure them."""

    device: str
    size: ModelSize
    bytes_per_second: float | None
    operations_per_second: float | None
    precision: str = "bf16"
    """Precision of the weights; int8 for all 8-bit formats, whose products are still computed in bfloat16."""

    @classmethod
    def of(cls, context: StageContext, shape: ModelConfig, precision: str = "bf16") -> Roofline:
        """Takes the peaks from the same run. None on a CPU, where a share of tiny sizes would mean nothing."""
        known = context.device == "cuda"
        return cls(
            device=context.device,
            size=size_of(shape),
            bytes_per_second=context.roof("most bytes/s") if known else None,
            operations_per_second=context.roof("bf16 operations/s") if known else None,
            precision=precision,
        )

    def least_seconds(self, *, tokens: int, rows: int, kept: float) -> float | None:
        """Least time of a step over `tokens` tokens that samples for `rows` sequences of `kept` tokens each."""
        if not self.bytes_per_second or not self.operations_per_second:
            return None
        work = work_of(self.size, tokens=tokens, rows=rows, kept=kept, precision=self.precision)
        return max(work.bytes_read / self.bytes_per_second, work.operations / self.operations_per_second)
