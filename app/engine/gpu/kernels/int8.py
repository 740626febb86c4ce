"""x W^T + b with W in whole numbers of eight bits and a scale for each row, in plain torch, on any device.

The kernel whose twin it is: triton/int8.py. Shape legend: T tokens of the step, K columns, N rows of
the weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.quantization.int8_weights import Quantized

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
