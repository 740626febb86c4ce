"""Products with weights of eight bits in plain torch: whole numbers (int8) and e4m3 (fp8), one scale for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.quantization.int8_weights import Quantized

# The kernel whose twin it is: app/engine/gpu/kernels/triton/quantized_products.py. Shape legend: T tokens of the step,
# K columns, N rows of the weight.

Int8Product = Callable[[Tensor, Quantized, Tensor | None], Tensor]
"""(x [T, K], weight, bias [N] or None) -> [T, N] in x's number format, summed in float32."""
_PIECE = 1 << 22
"""Numbers of a weight that are widened at once."""


def dequantised_product(x_TK: Tensor, weight: Quantized, bias_N: Tensor | None) -> Tensor:
    """The product with the weight widened piece by piece; the whole is never there.

    The numbers are exact in bfloat16 as they stand, and scales come last: as in the kernel.
    """
    rows = max(1, _PIECE // weight.numbers.shape[1])
    pieces = zip(weight.numbers.split(rows), weight.scales.split(rows), strict=True)
    parts = [F.linear(x_TK.float(), numbers.float()) * scales for numbers, scales in pieces]
    out_TN = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return (out_TN if bias_N is None else out_TN + bias_N.float()).to(x_TK.dtype)


# A row's largest number becomes 448 or -448, the largest that e4m3 has. A row of activations is scaled by nothing but
# itself, so the other rows of a step do not change it. On a GPU the product is torch's scaled one; on a CPU
# the same rounded numbers are widened again: so tests and the measurement of quality compute.
#
# Shape legend: T tokens of the step, K columns, N rows of the weight.

FP8_DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
FP8_MULTIPLE = 16
"""The GPU's product takes matrices whose rows and columns are multiples of it."""
"""Numbers of a weight in float32 at once."""


class Rounded(NamedTuple):
    """Rows [rows, K]: numbers x scales."""

    numbers: Tensor
    """e4m3."""
    scales_X1: Tensor
    """float32 [rows, 1], above 0."""


Fp8Rows = Callable[[Tensor], Rounded]
"""x [T, K] -> its rows, each with a scale of its own."""


def round_rows(x_TK: Tensor) -> Rounded:
    """The nearest numbers; a row of zeros stays one, and a row that is not finite is nowhere finite afterwards."""
    wide_TK = x_TK.float()
    # By a tensor: by a number of the host a GPU multiplies with its rounded inverse, and the last bit is another.
    scales_T1 = wide_TK.abs().amax(dim=-1, keepdim=True) / wide_TK.new_full((), LARGEST)
    scales_T1 = scales_T1.where(scales_T1 != 0, 1.0)
    return Rounded((wide_TK / scales_T1).to(FP8_DTYPE), scales_T1)


def round_weight(weight_NK: Tensor) -> Rounded:
    """round_rows() in pieces: a copy of the whole in float32 may be more than there is memory for."""
    rows = max(1, _PIECE // weight_NK.shape[1])
    parts = [round_rows(part) for part in weight_NK.detach().split(rows)]
    return Rounded(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def product(x: Rounded, weight: Rounded, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b [T, N] in `dtype`, summed in float32; on a GPU `dtype` is bfloat16."""
    if x.numbers.is_cuda:
        return scaled_product(x, weight, bias_N, dtype)
    out_TN = F.linear(_widened(x), _widened(weight), None if bias_N is None else bias_N.float())
    return out_TN.to(dtype)


def scaled_product(x: Rounded, weight: Rounded, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """product() as torch offers it: by its public name where it has one, else by the one before that."""
    numbers_KN, scales_1N = weight.numbers.t(), weight.scales_X1.t()
    if not hasattr(F, "scaled_mm"):
        return torch._scaled_mm(x.numbers, numbers_KN, x.scales_X1, scales_1N, bias=bias_N, out_dtype=dtype)
    by_row = F.ScalingType.RowWise
    return F.scaled_mm(x.numbers, numbers_KN, x.scales_X1, by_row, scales_1N, by_row, bias=bias_N, output_dtype=dtype)


def _widened(rounded: Rounded) -> Tensor:
    return rounded.numbers.float() * rounded.scales_X1
