"""Medians, spreads and ratios over samples of many rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the rounds gave."""

    median: float
    least: float
    most: float
    rounds: int


def summarise(samples: Sequence[float]) -> Summary:
    """Of one sample and more."""
    return Summary(median=statistics.median(samples), least=min(samples), most=max(samples), rounds=len(samples))


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Summary | None:
    """Ours through theirs, round by round, so that a slow window meets both; None without a common round."""
    pairs = [ours[number] / theirs[number] for number in ours if theirs.get(number)]
    return summarise(pairs) if pairs else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the machine gave in the same rounds: nothing that reads and multiplies can be faster."""

    read: Mapping[int, float]
    """Bytes a second, by how many bytes are read over and over: small ones lie in a cache."""
    multiply: Mapping[str, float]
    """Multiplications and additions a second, by precision."""

    def bandwidth(self, size: float) -> float:
        """Between two measured sizes a straight line over the logarithm of the size."""
        sizes = sorted(self.read)
        if size <= sizes[0]:
            return self.read[sizes[0]]
        for below, above in pairwise(sizes):
            if size <= above:
                share = log(size / below) / log(above / below)
                return self.read[below] + share * (self.read[above] - self.read[below])
        return self.read[sizes[-1]]

    def least_seconds(self, work: Work) -> float:
        """The longer one of reading and multiplying."""
        return max(work.bytes_read / self.bandwidth(work.bytes_read), work.operations / self.multiply[work.precision])


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step cannot do without."""

    bytes_read: float
    operations: float
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """How many numbers a model is made of."""

    body: int
    """In the matrices of all blocks."""
    head: int
    """In the output projection."""
    kv_per_token: int
    """Kept for one token over all layers."""


_BYTES = {"bf16": 2, "f32": 4, "int8": 1}


def work_of(model: ModelSize, *, tokens: int, rows: int, kept: float, precision: str) -> Work:
    """A step that takes in `tokens` tokens and draws for `rows` of them, each behind `kept` tokens of its own.

    All matrices are read once. Keys and values are in bfloat16 beside int8 weights. The products of attention are left
    out of the operations: few compared with those of the matrices at the lengths measured here.
    """
    kv_bytes = 4 if precision == "f32" else 2
    return Work(
        bytes_read=(model.body + model.head) * _BYTES[precision] + rows * kept * model.kv_per_token * kv_bytes,
        operations=2.0 * (model.body * tokens + model.head * rows),
        precision=precision,
    )
