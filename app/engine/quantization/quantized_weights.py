"""Weights as integers or fp8 (e4m3) with one scale per row, and their products in plain torch for any device.

Integers are symmetric and weight-only: a row's largest value becomes the largest integer of its format or the negative
(127 and -127 in int8), activations are unchanged. The native kernels compute with the integers; torch computes with the
same weights, rounded to the same grid and stored in their own dtype: these weights define the format. A GPU multiplies
with the products here where app/engine/gpu/kernels/triton/quantized_products.py does not; they are its reference, too.
Shape legend: T tokens of the step, K columns, N rows of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.nn.feed_forward import RoutedExperts
from model.nn.layers import Linear
from model.nn.transformer import Decoder
from model.weight_formats import KINDS, Codes, WeightFormat

_PIECE = 1 << 18
"""Elements per piece: its copies stay in a core's cache; copies of a whole matrix would be new memory each time."""
_GPU_PIECE = 1 << 24
"""Elements per piece on a GPU, where launching small pieces would take most of the time."""


class Quantized(NamedTuple):
    """A matrix [rows, columns]: numbers x scales."""

    numbers: Tensor
    """int8, -largest to largest."""
    scales: Tensor
    """float32 [rows], above 0."""


def quantize(weight: Tensor, largest: float) -> Quantized:
    """Rounds a matrix to the nearest integers and scales; a row of zeros stays zero.

    largest: the integer of a row's largest number, at most 127.
    """
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    rows = max(1, (_GPU_PIECE if weight.is_cuda else _PIECE) // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        numbers[part], scales[part] = _quantize(weight.detach()[part].float(), largest)
    return Quantized(numbers, scales)


def round_weights(decoder: Decoder, weight_format: WeightFormat) -> None:
    """Rounds each matrix of `decoder` except routers to the grid of this format: its accuracy without its speed."""
    if not weight_format.is_quantized:
        return
    for owner in decoder.modules():
        if isinstance(owner, Linear):
            owner.weight = _rounded(owner.weight, weight_format)
        if isinstance(owner, RoutedExperts):
            round_experts(owner, weight_format)
    decoder.embedding = _rounded(decoder.embedding, weight_format)
    if decoder.untied_head is not None:
        decoder.untied_head = _rounded(decoder.untied_head, weight_format)


@torch.no_grad()
def round_experts(experts: RoutedExperts, weight_format: WeightFormat) -> None:
    """Rounds their matrices in place, one after another: all in float32 could take more memory than there is."""
    for matrix in (*experts.up, *experts.down):
        matrix.copy_(_rounded(matrix, weight_format))


def _quantize(wide: Tensor, largest: float) -> Quantized:
    scales = wide.abs().amax(dim=1) / wide.new_full((), largest)  # dividing by a scalar is inexact on a GPU
    scales = scales.where(scales > 0, 1.0)
    return Quantized((wide / scales[:, None]).round_().to(torch.int8), scales)


def _rounded(weight: Tensor, weight_format: WeightFormat) -> nn.Parameter:
    wide = DEQUANTIZED[weight_format.facts.codes](weight, weight_format)
    return nn.Parameter(wide.to(weight.dtype), requires_grad=False)


def _from_integers(weight: Tensor, weight_format: WeightFormat) -> Tensor:
    numbers, scales = quantize(weight, weight_format.facts.largest)
    return numbers.float() * scales[:, None]


DEQUANTIZED: Mapping[Codes, Callable[[Tensor, WeightFormat], Tensor]] = {"integers": _from_integers}
"""Matrix -> its numbers after rounding, in float32. Codes that round activations, too, are not weights alone."""


Int8Product = Callable[[Tensor, Quantized, Tensor | None], Tensor]
"""(x [T, K], weight, bias [N] or None) -> [T, N] in x's number format, summed in float32."""
_CHUNK_NUMBERS = 1 << 22
"""Numbers of a weight that are converted to float32 at a time."""


def dequantized_product(x_TK: Tensor, weight: Quantized, bias_N: Tensor | None) -> Tensor:
    """The product with the weight converted to float32 in chunks, never as a whole.

    As in the kernel, int8 numbers are exact in bfloat16, and scales are applied last.
    """
    rows = max(1, _CHUNK_NUMBERS // weight.numbers.shape[1])
    pieces = zip(weight.numbers.split(rows), weight.scales.split(rows), strict=True)
    parts = [F.linear(x_TK.float(), numbers.float()) * scales for numbers, scales in pieces]
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
