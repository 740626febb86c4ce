"""Weights as 8-bit integers with one scale per row: `--quantize int8`.

Symmetric and weight-only: a row's largest value becomes 127 or -127, activations are unchanged. The native kernels
compute with the integers; torch computes with the same weights, rounded to the same grid and stored in their own dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.nn.layers import Linear
from model.nn.transformer import Decoder

_MAX_INT8 = 127
_PIECE = 1 << 18
"""Elements per piece: its copies stay in a core's cache, while those of a whole matrix are new memory each time."""
_GPU_PIECE = 1 << 24
"""Elements per piece on a GPU, where launching small pieces would take most of the time."""


class Quantized(NamedTuple):
    """A matrix [rows, columns]: numbers x scales."""

    numbers: Tensor
    """int8, -127 to 127."""
    scales: Tensor
    """float32 [rows], above 0."""


def quantize(weight: Tensor) -> Quantized:
    """Rounds a matrix to the nearest integers and scales; a row of zeros stays zero."""
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    rows = max(1, (_GPU_PIECE if weight.is_cuda else _PIECE) // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        numbers[part], scales[part] = _quantize(weight.detach()[part].float())
    return Quantized(numbers, scales)


def round_weights(decoder: Decoder) -> None:
    """Rounds each matrix of `decoder` to its int8 grid: the accuracy of int8 without its speed."""
    for owner in decoder.modules():
        if isinstance(owner, Linear):
            owner.weight = _rounded(owner.weight)
    decoder.embedding = _rounded(decoder.embedding)
    if decoder.untied_head is not None:
        decoder.untied_head = _rounded(decoder.untied_head)


def _quantize(wide: Tensor) -> Quantized:
    scales = wide.abs().amax(dim=1) / wide.new_full((), _MAX_INT8)  # dividing by a scalar is inexact on a GPU
    scales = scales.where(scales > 0, 1.0)
    return Quantized((wide / scales[:, None]).round_().to(torch.int8), scales)


def _rounded(weight: Tensor) -> nn.Parameter:
    numbers, scales = quantize(weight)
    return nn.Parameter((numbers.float() * scales[:, None]).to(weight.dtype), requires_grad=False)
