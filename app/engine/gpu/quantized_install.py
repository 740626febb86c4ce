"""Replaces the matrix products of a decoder with quantized ones.

Embeddings stay as they are, and so does a head that shares their matrix: it is read as an embedding too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from app.engine.gpu.linears import Bf16Linear, Quantize, fits_fp8, make_linear
from app.engine.gpu.linears import Linear as Product
from app.engine.gpu.triton_loader import TWINS, RoundedKernels
from model.nn.layers import Linear
from model.nn.transformer import Decoder


def install(decoder: Decoder, quantize: Quantize, kernels: RoundedKernels = TWINS) -> None:
    """Rounds every matrix and frees what it was; to be called before seal()."""
    for owner in decoder.modules():
        if isinstance(owner, Linear):
            owner.product = _as_product(make_linear(owner.weight, owner.bias, quantize, kernels=kernels))
    if decoder.untied_head is not None:
        head = make_linear(decoder.untied_head, decoder.head_bias, quantize, kernels=kernels)
        if not isinstance(head, Bf16Linear):  # else it stays for app/engine/gpu/padded_lm_head.py
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


def _as_product(linear: Product) -> partial[Tensor]:
    return partial(_product, linear)


def _product(linear: Product, x: Tensor, _weight: Tensor, _bias: Tensor | None) -> Tensor:
    return linear(x)
