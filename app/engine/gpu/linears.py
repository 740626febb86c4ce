"""Matrix products of a network on a GPU, with unquantized, integer or fp8 weights.

Nothing is read back from the device and no shape depends on a value, so a CUDA graph can capture them. Rows are
independent; but a library selects its tile by their number, so on a GPU the last bits of a row may depend on it (see
--deterministic), except of integers in steps of up to 64 tokens, whose kernel sums in a fixed order.

quantize_decoder() replaces the products of a decoder with quantized ones. Embeddings are not quantized, and neither is
a tied LM head, whose matrix is the embedding. Experts stay integers if a GPU's kernels multiply with them; for torch
they are rounded to integers, and stored in their own number format.

Shape legend: T tokens of the step, K columns, N rows of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from app.engine.gpu.triton_loader import REFERENCE_KERNELS, QuantizedKernels
from app.engine.quantization.quantized_weights import (
    FP8_MULTIPLE,
    fp8_product,
    quantize,
    quantize_fp8_weight,
    round_experts,
)
from model.nn.feed_forward import ExpertIntegers, RoutedExperts
from model.nn.layers import Linear, product
from model.nn.transformer import Decoder
from model.weight_formats import Codes, WeightFormat

Product = Callable[..., Tensor]
"""product() of model/nn/layers.py, or a quantized one that owns its weight and ignores the one it is given."""


def quantized_product(
    weight: Tensor, bias: Tensor | None, weight_format: WeightFormat, kernels: QuantizedKernels = REFERENCE_KERNELS
) -> Product | None:
    """x [T, K] -> x W^T + b [T, N]. Takes ownership of the weight [N, K]: quantizing frees the original.

    Integers of 8 bits halve the bytes to read. fp8 quantizes activations, too: half the bytes and twice the tensor-core
    throughput of bfloat16. None without quantization, and if the format does not support the sizes (fits). kernels: see
    quantized_kernels().
    """
    if not weight_format.is_quantized or not fits(weight, weight_format):
        return None
    make_product = _FORMATS[weight_format.facts.codes].make_product
    return make_product(weight, None if bias is None else bias.detach(), weight_format, kernels)


def _integer_product(
    weight: Tensor, bias_N: Tensor | None, weight_format: WeightFormat, kernels: QuantizedKernels
) -> Product:
    integers = quantize(weight, weight_format.facts.largest)
    _free(weight)
    return lambda x_TK, _weight, _bias: kernels.int8_product(x_TK, integers, bias_N)


def _fp8_product(
    weight: Tensor, bias_N: Tensor | None, _weight_format: WeightFormat, kernels: QuantizedKernels
) -> Product:
    fp8 = quantize_fp8_weight(weight)
    _free(weight)
    return lambda x_TK, _weight, _bias: fp8_product(kernels.fp8_rows(x_TK), fp8, bias_N, x_TK.dtype)


class _GpuFormat(NamedTuple):
    """How a GPU multiplies with quantized weights."""

    make_product: Callable[[Tensor, Tensor | None, WeightFormat, QuantizedKernels], Product]
    """The product with a weight [N, K], which it frees, and a bias."""
    multiple: int
    """Rows and columns of a matrix must be multiples of it."""


_FORMATS: Mapping[Codes, _GpuFormat] = {
    "integers": _GpuFormat(_integer_product, 1),  # integers of fewer bits take 8, too
    "e4m3": _GpuFormat(_fp8_product, FP8_MULTIPLE),
}


def _free(weight: Tensor) -> None:
    """Keeps the shape, and one NaN as all numbers."""
    weight.data = weight.data.new_full((), torch.nan).expand(weight.shape)


def fits(weight: Tensor, weight_format: WeightFormat) -> bool:
    """Whether the GPU's product in this quantized format supports the sizes of this matrix."""
    return not any(size % _FORMATS[weight_format.facts.codes].multiple for size in weight.shape)


def quantize_decoder(
    decoder: Decoder,
    weight_format: WeightFormat,
    kernels: QuantizedKernels = REFERENCE_KERNELS,
    *,
    integer_experts: bool = False,
) -> None:
    """Quantizes every matrix and frees the original; to be called before cache_attributes().

    integer_experts: whether the kernels of steps multiply with the integers of experts, as torch does not.
    """
    for owner in decoder.modules():
        if isinstance(owner, Linear):
            owner.product = quantized_product(owner.weight, owner.bias, weight_format, kernels) or product
        if isinstance(owner, RoutedExperts) and weight_format.is_quantized:
            (_quantize_experts if integer_experts else round_experts)(owner, weight_format)
    if decoder.untied_head is not None:  # padded_lm_head() handles an unquantized head
        head = quantized_product(decoder.untied_head, decoder.head_bias, weight_format, kernels)
        decoder.head_product = head or product


def _quantize_experts(experts: RoutedExperts, weight_format: WeightFormat) -> None:
    """Every row of each expert's matrix has a scale of its own."""
    numbers, scales = [], []
    for parameter in (experts.up, experts.down):
        integers = quantize(parameter.flatten(0, 1), weight_format.facts.largest)
        numbers.append(integers.numbers.view(parameter.shape))
        scales.append(integers.scales.view(parameter.shape[:2]))
        _free(parameter)
    experts.integers = ExpertIntegers(*numbers, *scales)


def describe_unquantized(decoder: Decoder, weight_format: WeightFormat) -> str | None:
    """Log message about matrices whose sizes the format does not support; None if there are none."""
    if not weight_format.is_quantized:
        return None
    matrices = list(_matrices(decoder))
    unsupported = [weight for weight in matrices if not fits(weight, weight_format)]
    if not unsupported:
        return None
    sizes = ", ".join(sorted({f"{rows} x {columns}" for rows, columns in (weight.shape for weight in unsupported)}))
    return (
        f"{len(unsupported)} of {len(matrices)} matrices are not quantized: {weight_format.kind} requires multiples of "
        f"{_FORMATS[weight_format.facts.codes].multiple}, and their sizes are {sizes}"
    )


def _matrices(decoder: Decoder) -> Iterator[Tensor]:
    yield from (owner.weight for owner in decoder.modules() if isinstance(owner, Linear))
    if decoder.untied_head is not None:
        yield decoder.untied_head
