"""Matrix products of a network on a GPU, with the weight as it is, in int8 or in fp8.

Each owns its weights. Nothing is read back from the device and no shape depends on a value, so a CUDA graph can capture
them. Rows are independent; but a library chooses its tile by their number, so on a GPU the last bits of a row may
depend on it (see --deterministic), except in int8, whose kernel sums in a fixed order.

Shape legend: T tokens of the step, K columns, N rows of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.gpu.kernels.quantized_products import FP8_MULTIPLE, Fp8Rows, Int8Product, product, round_weight
from app.engine.gpu.triton_loader import TWINS, RoundedKernels
from app.engine.quantization.int8_weights import quantize as quantize_int8

Quantize = Literal["none", "int8", "fp8"]
Linear = Callable[[Tensor], Tensor]
_FP8_CAPABILITY = (8, 9)


def make_linear(
    weight: Tensor,
    bias: Tensor | None,
    quantize: Quantize,
    *,
    kernels: RoundedKernels = TWINS,
) -> Linear:
    """x [T, K] -> x W^T + b [T, N], for a weight [N, K] that it takes ownership of: quantizing frees the original.

    An fp8 product whose sizes do not allow it (see fits_fp8) stays as it is. kernels: see rounded_kernels().
    """
    if quantize == "int8":
        linear: Linear = Int8Linear(weight, bias, kernels.int8_product)
    elif quantize == "fp8" and fits_fp8(weight):
        linear = Fp8Linear(weight, bias, kernels.fp8_rows)
    else:
        return Bf16Linear(weight, bias)
    weight.data = weight.data.new_full((), torch.nan).expand(weight.shape)  # one NaN
    return linear


def fits_fp8(weight: Tensor) -> bool:
    """Whether the GPU's fp8 product takes a matrix of these sizes."""
    return not any(size % FP8_MULTIPLE for size in weight.shape)


def check_quantize(
    quantize: Quantize, device: str, dtype: torch.dtype, capability: tuple[int, int] | None = None
) -> None:
    """Refuses fp8 where it cannot be. Raises ValueError. capability: of the GPU, where it is one."""
    if quantize != "fp8":
        return
    if device != "cuda":
        raise ValueError(f"--quantize fp8 takes a GPU, and this is a {device}: take --quantize int8 or none")
    if capability is None or capability < _FP8_CAPABILITY:
        had = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
        raise ValueError(
            "--quantize fp8 takes a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell), and this one's is "
            f"{had}: take --quantize int8 or none"
        )
    if dtype != torch.bfloat16:
        raise ValueError("--quantize fp8 computes in bfloat16: take --dtype bfloat16 or auto")


class Bf16Linear:
    """The weight in the number format that it came in: bfloat16 on a GPU by default."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight_NK = weight.detach()
        self.bias_N = None if bias is None else bias.detach()

    def __call__(self, x_TK: Tensor) -> Tensor:
        return F.linear(x_TK, self.weight_NK, self.bias_N)


class Fp8Linear:
    """Weight and activations in e4m3: half the bytes to read, and twice the arithmetic of bfloat16 on tensor cores."""

    def __init__(self, weight: Tensor, bias: Tensor | None, fp8_rows: Fp8Rows) -> None:
        self._fp8_rows = fp8_rows
        self.rounded = round_weight(weight)
        self.bias_N = None if bias is None else bias.detach()

    def __call__(self, x_TK: Tensor) -> Tensor:
        return product(self._fp8_rows(x_TK), self.rounded, self.bias_N, x_TK.dtype)


class Int8Linear:
    """The weight in whole numbers of eight bits, activations as they are: half the bytes to read."""

    def __init__(self, weight: Tensor, bias: Tensor | None, int8_product: Int8Product) -> None:
        self.quantized = quantize_int8(weight)
        self.bias_N = None if bias is None else bias.detach()
        self._product = int8_product

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._product(x_TK, self.quantized, self.bias_N)
