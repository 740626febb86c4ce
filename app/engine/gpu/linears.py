"""Matrix products of a network on a GPU, with the weight as it is, in int8 or in fp8.

Each owns its weights. Nothing is read back from the device and no shape depends on a value, so a CUDA graph can capture
them. Rows are independent; but a library chooses its tile by their number, so on a GPU the last bits of a row may
depend on it (see --deterministic), except in int8, whose kernel sums in a fixed order.

install() replaces the products of a decoder with quantized ones. Embeddings stay as they are, and so does a head that
shares their matrix: it is read as an embedding too.

The matrix of the LM head is padded with zero rows to an aligned vocabulary size (whole_head). cuBLAS writes the rows of
logits contiguously, and falls back to slow kernels where rows are not aligned to 16 bytes: with 50,257 tokens, or
32,001. With padded rows it is fast, and the padding between two rows is ignored.

Shape legend: T tokens of the step, K columns, N rows of the weight, S rows that want logits, D width, V vocabulary, W
the vocabulary with its padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.gpu.kernels.reference_operations import FP8_MULTIPLE, Fp8Rows, Int8Product, fp8_product, round_weight
from app.engine.gpu.triton_loader import TWINS, RoundedKernels
from app.engine.quantization.int8_weights import quantize as quantize_int8
from model.nn.layers import Linear, product
from model.nn.transformer import Decoder

Quantize = Literal["none", "int8", "fp8"]
MatrixProduct = Callable[[Tensor], Tensor]
_FP8_CAPABILITY = (8, 9)


def make_linear(
    weight: Tensor,
    bias: Tensor | None,
    quantize: Quantize,
    *,
    kernels: RoundedKernels = TWINS,
) -> MatrixProduct:
    """x [T, K] -> x W^T + b [T, N], for a weight [N, K] that it takes ownership of: quantizing frees the original.

    An fp8 product whose sizes do not allow it (see fits_fp8) stays as it is. kernels: see rounded_kernels().
    """
    if quantize == "int8":
        linear: MatrixProduct = Int8Linear(weight, bias, kernels.int8_product)
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
        return fp8_product(self._fp8_rows(x_TK), self.rounded, self.bias_N, x_TK.dtype)


class Int8Linear:
    """The weight in whole numbers of eight bits, activations as they are: half the bytes to read."""

    def __init__(self, weight: Tensor, bias: Tensor | None, int8_product: Int8Product) -> None:
        self.quantized = quantize_int8(weight)
        self.bias_N = None if bias is None else bias.detach()
        self._product = int8_product

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._product(x_TK, self.quantized, self.bias_N)


WHOLE = 64
"""Numbers: 128 bytes of bfloat16, which is what matrix units take best."""


def whole_head(decoder: Decoder) -> Callable[[Tensor], Tensor]:
    """decoder.head, logits [S, V] of hidden states [S, D], as a view whose rows are W apart.

    The matrix moves to where it has room for more rows: it is there once, also where it is the embedding, too.
    """
    vocab = decoder.config.vocab_size
    if decoder.head_product is not product or not vocab % WHOLE:
        return decoder.head
    matrix = decoder.embedding if decoder.untied_head is None else decoder.untied_head
    matrix_WD = _whole(matrix)
    matrix.data = matrix_WD[:vocab]
    bias_W = None if decoder.head_bias is None else _whole(decoder.head_bias)
    return lambda hidden_SD: decoder.capped(F.linear(hidden_SD, matrix_WD, bias_W)[:, :vocab])


def _whole(rows: Tensor) -> Tensor:
    """With rows of zeros behind them."""
    whole = rows.new_zeros(-(-len(rows) // WHOLE) * WHOLE, *rows.shape[1:])
    whole[: len(rows)].copy_(rows.detach())
    return whole


def install(decoder: Decoder, quantize: Quantize, kernels: RoundedKernels = TWINS) -> None:
    """Rounds every matrix and frees what it was; to be called before seal()."""
    for owner in decoder.modules():
        if isinstance(owner, Linear):
            owner.product = _as_product(make_linear(owner.weight, owner.bias, quantize, kernels=kernels))
    if decoder.untied_head is not None:
        head = make_linear(decoder.untied_head, decoder.head_bias, quantize, kernels=kernels)
        if not isinstance(head, Bf16Linear):  # else it stays for app/engine/gpu/linears.py
            decoder.head_product = _as_product(head)


def what_stays(decoder: Decoder, quantize: Quantize) -> str | None:
    """For the log: matrices that fp8 cannot take. None where it takes them all, or is not asked to."""
    matrices = list(_matrices(decoder))
    left = [weight for weight in matrices if quantize == "fp8" and not fits_fp8(weight)]
    if not left:
        return None
    sizes = ", ".join(sorted({f"{rows} x {columns}" for rows, columns in (weight.shape for weight in left)}))
    return (
        f"{len(left)} of {len(matrices)} matrices stay in the format they came in: fp8 takes multiples of 16, and they "
        f"are {sizes}"
    )


def _matrices(decoder: Decoder) -> Iterator[Tensor]:
    yield from (owner.weight for owner in decoder.modules() if isinstance(owner, Linear))
    if decoder.untied_head is not None:
        yield decoder.untied_head


def _as_product(linear: MatrixProduct) -> partial[Tensor]:
    return partial(_product, linear)


def _product(linear: MatrixProduct, x: Tensor, _weight: Tensor, _bias: Tensor | None) -> Tensor:
    return linear(x)
