"""Weights that are stored in fewer bits, and their products in plain torch for any device.

Packed matrices (model/packed_matrix.py) are weight-only: products compute with the numbers that they stand for, rounded
to the format of the step. fp8 (e4m3) rounds activations, too. A GPU multiplies with the products here where
app/engine/gpu/kernels/triton/quantized_products.py does not; they are its reference, too.
Shape legend: T tokens of the step, K columns, N rows of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model.nn.packed_tensors import PackedTensors
from model.weight_formats import KINDS

PackedProduct = Callable[[Tensor, PackedTensors, Tensor | None], Tensor]
"""(x [T, K], weight, bias [N] or None) -> [T, N] in x's number format, summed in float32."""
_CHUNK_NUMBERS = 1 << 22
"""Numbers of a weight that are dequantized at a time."""


def packed_product(x_TK: Tensor, weight: PackedTensors, bias_N: Tensor | None) -> Tensor:
    """The product with the weight dequantized in chunks, never as a whole."""
    n_rows, step = len(weight.codes), max(1, _CHUNK_NUMBERS // x_TK.shape[1])
    chunks = (weight.dequantized(x_TK.dtype, slice(start, start + step)) for start in range(0, n_rows, step))
    parts = [F.linear(x_TK.float(), chunk.float()) for chunk in chunks]
    out_TN = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return (out_TN if bias_N is None else out_TN + bias_N.float()).to(x_TK.dtype)


# A row's largest number becomes 448 or -448, the largest in e4m3. The scale of a row of activations depends on that row
# only, so other rows of a step do not change it. On a GPU the product is torch's scaled one; on a CPU the same
# quantized numbers are converted back to float32, for tests and quality measurements.

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = KINDS["fp8"].largest
FP8_MULTIPLE = 16
"""Rows and columns of a matrix must be multiples of it for the GPU's product."""


class Fp8Matrix(NamedTuple):
    """A matrix [rows, K] quantized row by row: numbers * scales."""

    numbers: Tensor
    """e4m3."""
    scales_X1: Tensor
    """float32 [rows, 1], above 0."""


Fp8RowQuantizer = Callable[[Tensor], Fp8Matrix]
"""x [T, K] -> quantized rows, each with its own scale."""


def quantize_fp8_rows(x_TK: Tensor) -> Fp8Matrix:
    """Rounds to nearest. A row of zeros stays zero; a row that is not finite has no finite numbers afterwards."""
    wide_TK = x_TK.float()
    # Divide by a tensor: by a Python number, a GPU multiplies with the rounded inverse, which changes the last bit.
    scales_T1 = wide_TK.abs().amax(dim=-1, keepdim=True) / wide_TK.new_full((), FP8_MAX)
    scales_T1 = scales_T1.where(scales_T1 != 0, 1.0)
    return Fp8Matrix((wide_TK / scales_T1).to(FP8_DTYPE), scales_T1)


def quantize_fp8_weight(weight_NK: Tensor) -> Fp8Matrix:
    """quantize_fp8_rows() in chunks: a float32 copy of the whole weight may not fit into memory."""
    rows = max(1, _CHUNK_NUMBERS // weight_NK.shape[1])
    parts = [quantize_fp8_rows(part) for part in weight_NK.detach().split(rows)]
    return Fp8Matrix(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def fp8_product(x: Fp8Matrix, weight: Fp8Matrix, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + b [T, N] in `dtype`, summed in float32; on a GPU `dtype` is bfloat16."""
    if x.numbers.is_cuda:
        return scaled_product(x, weight, bias_N, dtype)
    out_TN = F.linear(_dequantize(x), _dequantize(weight), None if bias_N is None else bias_N.float())
    return out_TN.to(dtype)


def scaled_product(x: Fp8Matrix, weight: Fp8Matrix, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """torch's scaled product."""
    by_row, weight_KN, scales_1N = F.ScalingType.RowWise, weight.numbers.t(), weight.scales_X1.t()
    return F.scaled_mm(x.numbers, weight_KN, x.scales_X1, by_row, scales_1N, by_row, bias=bias_N, output_dtype=dtype)


def _dequantize(quantized: Fp8Matrix) -> Tensor:
    return quantized.numbers.float() * quantized.scales_X1
