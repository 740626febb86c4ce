"""Formats in which matrices of weights are stored, and what depends on the format alone.

docs/extending.md says how to add one. model/quantize.py makes packed matrices, which torch on a CPU dequantizes, and
with which a GPU multiplies in app/engine/gpu/linears.py. The C++ kernels list their number formats in
app/engine/cpu/source/formats.h, by the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Quantize = Literal["none", "int4", "int8", "fp8"]
"""Values of --quantize: none, which keeps the number format of --dtype, or a kind of format below."""
Codes = Literal["numbers", "packed", "e4m3"]
"""What is stored: the numbers themselves; a packed matrix (model/packed_matrix.py), made by model/quantize.py; or
floating-point numbers of 8 bits that a scale of their row multiplies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatKind:
    """Facts about a kind of format."""

    codes: Codes
    bits: float
    """Of a number, with its share of scales and offsets in rows of whole units."""
    golden_tolerance: float | None
    """Largest relative difference from golden.json due to rounding; None: golden.json's own absolute tolerance.

    Of numbers: if steps compute with them in their own format. Nothing computes in float16; files have it.
    """
    largest: float = 0.0
    """The code of the largest number among those that share a scale, of e4m3."""
    needs_gpu: bool = False


KINDS: Mapping[str, FormatKind] = {
    "float32": FormatKind(codes="numbers", bits=32, golden_tolerance=None),
    "bfloat16": FormatKind(codes="numbers", bits=16, golden_tolerance=0.05),
    "float16": FormatKind(codes="numbers", bits=16, golden_tolerance=None),
    "int8": FormatKind(codes="packed", bits=8.5, golden_tolerance=0.1),
    "int4": FormatKind(codes="packed", bits=4.625, golden_tolerance=0.3),
    "fp8": FormatKind(codes="e4m3", bits=8, largest=448.0, golden_tolerance=0.15, needs_gpu=True),
}
"""Tolerances: see docs/numbers.md for what rounding costs."""
QUANTIZE: tuple[Quantize, ...] = get_args(Quantize)


def needs_gpu(quantize: Quantize) -> bool:
    """Whether only a GPU computes with this value of --quantize."""
    return quantize != "none" and KINDS[quantize].needs_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How the numbers of a matrix are stored. Raises ValueError if no executor computes with it."""

    kind: str
    """A key of KINDS."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"weights cannot be stored as {self.kind}")

    @property
    def facts(self) -> FormatKind:
        """The entry of its kind in KINDS."""
        return KINDS[self.kind]

    @property
    def is_quantized(self) -> bool:
        """Whether codes and scales are stored instead of numbers."""
        return self.facts.codes != "numbers"

    def n_bytes(self, numbers: int) -> int:
        """Bytes of so many numbers."""
        return math.ceil(numbers * self.facts.bits / 8)


def weight_format(dtype: str, quantize: Quantize) -> WeightFormat:
    """The format of weights with these values of --dtype (float32 or bfloat16) and --quantize."""
    return WeightFormat(kind=dtype if quantize == "none" else quantize)
