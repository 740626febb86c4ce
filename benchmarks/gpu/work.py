"""The minimal work of a step, and the least time that a GPU needs for it."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.finding import Bench
from benchmarks.peers.numbers import ModelSize, work_of
from benchmarks.peers.shapes import size_of
from model.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """Of one model on one machine; without roofs where stage `roofs` found none."""

    device: str
    size: ModelSize
    bytes_per_second: float | None
    operations_per_second: float | None
    precision: str = "bf16"
    """Of the weights; int8 for all of eight bits, whose products are still those of bfloat16."""

    @classmethod
    def of(cls, bench: Bench, shape: ModelConfig, precision: str = "bf16") -> Roofs:
        """By what was measured in the same run. A CPU computes tiny sizes, of which no share would mean anything."""
        known = bench.device == "cuda"
        return cls(
            device=bench.device,
            size=size_of(shape),
            bytes_per_second=bench.roof("most bytes/s") if known else None,
            operations_per_second=bench.roof("bf16 operations/s") if known else None,
            precision=precision,
        )

    def least_seconds(self, *, tokens: int, rows: int, kept: float) -> float | None:
        """Of a step that takes in `tokens` and draws for `rows` texts, each behind `kept` tokens of its own."""
        if not self.bytes_per_second or not self.operations_per_second:
            return None
        work = work_of(self.size, tokens=tokens, rows=rows, kept=kept, precision=self.precision)
        return max(work.bytes_read / self.bytes_per_second, work.operations / self.operations_per_second)
