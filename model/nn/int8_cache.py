"""Keys and values as codes of 8 bits: the definition that every executor's cache follows (docs/numbers.md).

Shape legend: X any, C head_dim, T tokens, K kv heads.

A vector of C numbers is a head's key or value of one token, in the number format of the step.

    scale  = max |number| / 127, rounded to bfloat16; 0 if that is below 2^-126
    code   = number / scale, rounded to the nearest integer, ties to even; 0 if the scale is 0
    number = code * scale

The rounded scale is at most 2^-8 too small, so that no code is beyond 127. If a number is not finite, the scale is NaN
and so is every number that is read: the step finds it as without codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.nn.attention import Attend

_LARGEST = 127
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).smallest_normal


def encode(x_XC: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [X, C] in int8, and scales [X] in bfloat16."""
    wide_XC = x_XC.float()
    scales_X = (wide_XC.abs().amax(-1) / _LARGEST).bfloat16()
    scales_X = scales_X.masked_fill(scales_X < _SMALLEST_SCALE, 0.0)
    scales_X = scales_X.masked_fill(~wide_XC.isfinite().all(-1), float("nan"))
    codes_XC = (wide_XC / scales_X.float()[..., None]).round()
    return codes_XC.nan_to_num(0.0, 0.0, 0.0).to(torch.int8), scales_X


def decode(codes_XC: Tensor, scales_X: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers [X, C], rounded once."""
    numbers_XC: Tensor = (codes_XC.float() * scales_X.float()[..., None]).to(dtype)
    return numbers_XC


class Int8CacheAttend:
    """Attention as over a cache in int8: an `Attend` that rounds keys and values, and attends with another."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(
        self, layer: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        """See Attend."""
        dtype = v_TKC.dtype
        k_TKC, v_TKC = (decode(*encode(x_TKC.to(dtype)), dtype) for x_TKC in (k_TKC, v_TKC))
        return self._attend(layer, q_THC, k_TKC, v_TKC, sinks_H)
