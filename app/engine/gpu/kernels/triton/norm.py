"""Residual sum and norm in one pass over a row, by Triton. Knows no network.

One program does a whole row, so that its bits depend on nothing else. Shape legend: T tokens, D width, W the next power
of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import NormSpec
from app.engine.gpu.kernels.launch_config import norm_launch, power_of_two


@triton.jit
def norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    bias_ptr,
    sum_ptr,
    normed_ptr,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    KIND: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One row: x + delta to sum_ptr where there is a delta, its norm to normed_ptr where KIND is not none."""
    column_W = tl.arange(0, PADDED)
    there_W = column_W < WIDTH
    place_W = tl.program_id(0).to(tl.int64) * WIDTH + column_W
    x_W = tl.load(x_ptr + place_W, mask=there_W, other=0.0)
    if HAS_DELTA:
        delta_W = tl.load(delta_ptr + place_W, mask=there_W, other=0.0)
        x_W = (x_W.to(tl.float32) + delta_W.to(tl.float32)).to(x_W.dtype)  # rounded, as torch rounds it
        tl.store(sum_ptr + place_W, x_W, mask=there_W)
    if KIND != "none":
        wide_W = x_W.to(tl.float32)
        if KIND == "layernorm":
            wide_W = tl.where(there_W, wide_W - tl.sum(wide_W, axis=0) / WIDTH, 0.0)
        wide_W = wide_W * tl.rsqrt(tl.sum(wide_W * wide_W, axis=0) / WIDTH + eps)
        if HAS_WEIGHT:
            wide_W = wide_W * tl.load(weight_ptr + column_W, mask=there_W, other=0.0).to(tl.float32)
        if HAS_BIAS:
            wide_W = wide_W + tl.load(bias_ptr + column_W, mask=there_W, other=0.0).to(tl.float32)
        tl.store(normed_ptr + place_W, wide_W.to(x_W.dtype), mask=there_W)


def add_norm(x_TD: Tensor, delta_TD: Tensor | None, norm: NormSpec) -> tuple[Tensor, Tensor]:
    """See Kernels.add_norm."""
    assert x_TD.is_contiguous() and (delta_TD is None or delta_TD.is_contiguous())
    if delta_TD is None and norm.kind == "none":
        return x_TD, x_TD
    sum_TD = x_TD if delta_TD is None else torch.empty_like(x_TD)
    normed_TD = sum_TD if norm.kind == "none" else torch.empty_like(x_TD)
    width = x_TD.shape[1]
    norm_kernel[(len(x_TD),)](
        x_TD,
        x_TD if delta_TD is None else delta_TD,
        x_TD if norm.weight is None else norm.weight,
        x_TD if norm.bias is None else norm.bias,
        sum_TD,
        normed_TD,
        norm.eps,
        WIDTH=width,
        PADDED=power_of_two(width),
        KIND=norm.kind,
        HAS_DELTA=delta_TD is not None,
        HAS_WEIGHT=norm.weight is not None,
        HAS_BIAS=norm.bias is not None,
        **norm_launch(width).options,
    )
    return sum_TD, normed_TD
