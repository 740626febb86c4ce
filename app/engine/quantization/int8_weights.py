"""Weights as whole numbers of eight bits with one scale for each row: `--quantize int8`.

Symmetric and weight-only: a row's largest number becomes 127 or -127, activations stay as they are. The native kernels
compute with the whole numbers; torch computes with the same weights, rounded to the same grid and stored as before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.nn.layers import Linear
from model.nn.transformer import Decoder

_MOST = 127
_PIECE = 1 << 18
"""Numbers at once: copies that stay in a core's cache, where those of a whole matrix are new memory each time."""
_GPU_PIECE = 1 << 24
"""The same on a GPU, which would do little but wait for the launches of small pieces."""


class Quantized(NamedTuple):
    """A matrix [rows, columns]: numbers x scales."""

    numbers: Tensor
    """int8, -127 to 127."""
    scales: Tensor
    """float32 [rows], above 0."""


def quantize(weight: Tensor) -> Quantized:
    """The nearest matrix of whole numbers; a row of zeros stays one."""
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    rows = max(1, (_GPU_PIECE if weight.is_cuda else _PIECE) // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = slice(start, start + rows)
        numbers[part], scales[part] = _quantize(weight.detach()[part].float())
    return Quantized(numbers, scales)


def round_weights(decoder: Decoder) -> None:
    """Puts each matrix of `decoder` on the grid that quantize() makes of it: what int8 costs, without its speed."""
    for owner in decoder.modules():
        if isinstance(owner, Linear):
            owner.weight = _rounded(owner.weight)
    decoder.embedding = _rounded(decoder.embedding)
    if decoder.untied_head is not None:
        decoder.untied_head = _rounded(decoder.untied_head)


def _quantize(wide: Tensor) -> Quantized:
    scales = wide.abs().amax(dim=1) / wide.new_full((), _MOST)  # a GPU divides by tensors only to the last bit
    scales = scales.where(scales > 0, 1.0)
    return Quantized((wide / scales[:, None]).round_().to(torch.int8), scales)


def _rounded(weight: Tensor) -> nn.Parameter:
    numbers, scales = quantize(weight)
    return nn.Parameter((numbers.float() * scales[:, None]).to(weight.dtype), requires_grad=False)
