"""Where a token stands, as numbers: rotary angles with their scalings, and sinusoids. Pure functions on tensors.

Shape legend: P positions, T tokens, N heads, C head_dim, F half of the numbers that turn, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from model.config import ModelConfig, RopeScaling

_SLICE = 4096


def rope_table(config: ModelConfig) -> Tensor:
    """[context, turned_dim] float32: the cosines of each position's angles, then the sines."""
    exponents_F = torch.arange(0, config.turned_dim, 2, dtype=torch.float64) / config.turned_dim
    frequencies_F = config.rope_theta**-exponents_F
    if config.rope_scaling:
        frequencies_F = _scaled(frequencies_F, config.rope_scaling)
    return _table(
        config.context, frequencies_F, lambda angles_PF: torch.cat((angles_PF.cos(), angles_PF.sin()), dim=-1)
    )


def rotate(x_TNC: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Rotary positions in the half-split layout (element i turns with element i + F), computed in float32.

    Numbers of a head beyond the first 2 F stay as they are.
    """
    half, head_dim = cos_T1F.shape[-1], x_TNC.shape[-1]
    first_TNF, second_TNF, *rest = x_TNC.split((half, half) + (head_dim - 2 * half,) * (2 * half < head_dim), dim=-1)
    turned = (first_TNF * cos_T1F - second_TNF * sin_T1F, second_TNF * cos_T1F + first_TNF * sin_T1F)
    return torch.cat((*turned, *rest), dim=-1).to(x_TNC.dtype)


def sinusoid_table(config: ModelConfig) -> Tensor:
    """[context, width] float32: sines in the even columns, cosines in the odd ones (arXiv:1706.03762, 3.5)."""
    exponents_F = torch.arange(0, config.width, 2, dtype=torch.float64) / config.width

    def sinusoids(angles_PF: Tensor) -> Tensor:
        return torch.stack((angles_PF.sin(), angles_PF.cos()), dim=-1).flatten(1)[:, : config.width]

    return _table(config.context, 10_000.0**-exponents_F, sinusoids)


def _table(context: int, frequencies_F: Tensor, row: Callable[[Tensor], Tensor]) -> Tensor:
    """`row` of each position's angles, a slice at a time: all of them in float64 would take six times the result."""
    positions_P = torch.arange(context, dtype=torch.float64)
    return torch.cat([row(slice_P[:, None] * frequencies_F).float() for slice_P in positions_P.split(_SLICE)])


def _scaled(frequencies_F: Tensor, scaling: RopeScaling) -> Tensor:
    stretched_F = frequencies_F / scaling.factor
    if scaling.kind == "linear":
        return stretched_F
    # How many times a wavelength fits into the original context decides how much it is stretched.
    turns_F = scaling.original_context * frequencies_F / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(stretched_F, frequencies_F, kept_F)
