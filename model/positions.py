"""Position tables, computed in float64 with numpy, so that every backend reads the same bits.

Shape legend: P positions, F half of the rotated dimensions, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.config import ModelConfig, Rope

Floats = NDArray[np.floating[Any]]
_SLICE_POSITIONS = 4096


def rope_table(config: ModelConfig, rope: Rope) -> Floats:
    """[context, rotated dimensions] float32: cosines of each position's angles, then sines; times attention_factor."""
    frequencies_F = _scaled(_frequencies(rope.theta, config.rotated_dim(rope)), rope, config.context)

    def factors(angles_PF: Floats) -> Floats:
        table_PC: Floats = np.concatenate((np.cos(angles_PF), np.sin(angles_PF)), axis=-1)
        return table_PC if rope.attention_factor == 1.0 else table_PC * rope.attention_factor

    return _table(config.context, frequencies_F, factors)


def query_scale_table(config: ModelConfig) -> Floats:
    """[context] float32: the factor of queries at each position."""
    assert config.query_scale
    periods_P = np.arange(config.context) // config.query_scale.original_context
    scales_P: Floats = 1.0 + config.query_scale.beta * np.log1p(periods_P)
    return scales_P.astype(np.float32)


def sinusoid_table(config: ModelConfig) -> Floats:
    """[context, width] float32: sines in the even columns, cosines in the odd ones (arXiv:1706.03762, 3.5)."""

    def sinusoids(angles_PF: Floats) -> Floats:
        pairs_PF2 = np.stack((np.sin(angles_PF), np.cos(angles_PF)), axis=-1)
        return pairs_PF2.reshape(len(angles_PF), -1)[:, : config.width]

    return _table(config.context, _frequencies(10_000.0, config.width), sinusoids)


def _frequencies(base: float, size: int) -> Floats:
    """[F]. math.pow rounds correctly nearly always; numpy's power differs by the CPU's vectors."""
    return np.array([math.pow(base, -(index / size)) for index in range(0, size, 2)])


def _table(context: int, frequencies_F: Floats, row: Callable[[Floats], Floats]) -> Floats:
    """`row` of each position's angles, in slices: all at once in float64 would take six times the result's memory."""
    starts = range(0, context, _SLICE_POSITIONS)
    slices = (np.arange(start, min(start + _SLICE_POSITIONS, context), dtype=np.float64) for start in starts)
    return np.concatenate([row(slice_P[:, None] * frequencies_F).astype(np.float32) for slice_P in slices])


def _scaled(frequencies_F: Floats, rope: Rope, context: int) -> Floats:
    stretched_F: Floats = frequencies_F / rope.factor
    match rope.kind:
        case "linear":
            return stretched_F
        case "llama3":
            return _by_wavelength(frequencies_F, stretched_F, rope)
        case "yarn":
            kept_F = _kept_by_yarn(len(frequencies_F), rope)
            mixed_F: Floats = stretched_F * (1 - kept_F) + frequencies_F * kept_F
            return mixed_F
        case "longrope":
            factors = rope.long_factors if rope.is_long(context) else rope.short_factors
            scaled_F: Floats = frequencies_F / np.array(factors)
            return scaled_F
    return frequencies_F


def _by_wavelength(frequencies_F: Floats, stretched_F: Floats, rope: Rope) -> Floats:
    # The number of rotations within the original context decides how much a wavelength is stretched.
    rotations_F = rope.original_context * frequencies_F / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    weight_F = ((rotations_F - low) / (high - low)).clip(0.0, 1.0)
    # As torch.lerp computes it: from the nearer end.
    nearer_high_F = frequencies_F - (frequencies_F - stretched_F) * (1 - weight_F)
    nearer_low_F = stretched_F + weight_F * (frequencies_F - stretched_F)
    return np.where(weight_F < 0.5, nearer_low_F, nearer_high_F)


def _kept_by_yarn(count: int, rope: Rope) -> Floats:
    """[F]: how much of each frequency stays as it was, from 1 for the highest to 0."""

    def dimension(rotations: float) -> float:
        """The pair of dimensions that rotates so often within the original context."""
        return count * math.log(rope.original_context / (rotations * 2 * math.pi)) / math.log(rope.theta)

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * count - 1)
    ramp_F: Floats = (np.arange(count) - first) / (last - first or 0.001)
    return 1 - ramp_F.clip(0.0, 1.0)
