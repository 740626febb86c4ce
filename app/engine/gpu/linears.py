"""Matrix products of a network on a GPU, with unquantized, packed or fp8 weights.

Nothing is read back from the device and no shape depends on a value, so a CUDA graph can capture them. Rows are
independent; but a library selects its tile by their number, so on a GPU the last bits of a row may depend on it (see
--deterministic), except of packed matrices in steps of up to 64 tokens, whose kernel sums in a fixed order.

pack_decoder() replaces the products of a decoder by those with packed matrices, of files or of --quantize, and
quantize_decoder() by fp8. The embedding keeps its numbers, and so does a tied LM head, whose matrix is the embedding.
Experts stay packed if a GPU's kernels multiply with them; for torch they have the numbers that the packed ones stand
for.

Shape legend: T tokens of the step, K columns, N rows of the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from app.engine.gpu.triton_loader import REFERENCE_KERNELS, QuantizedKernels
from app.engine.quantization.quantized_weights import FP8_MULTIPLE, fp8_product, quantize_fp8_weight
from model.config import ModelConfig
from model.nn.feed_forward import PackedExperts, RoutedExperts
from model.nn.layers import Linear, product
from model.nn.packed_tensors import PackedTensors
from model.nn.transformer import Decoder
from model.packed_matrix import concatenate
from model.quantize import PackedWeights

Product = Callable[..., Tensor]
"""product() of model/nn/layers.py, or a quantized one that owns its weight and ignores the one it is given."""


def packed_names(weights: PackedWeights, config: ModelConfig, *, packs_experts: bool) -> list[str]:
    """Names of the parameters that pack_decoder() keeps packed: of products, not of lookups and routers."""
    with torch.device("meta"):
        decoder = Decoder(config)
    names = ["untied_head"] if decoder.untied_head is not None else []
    for name, owner in decoder.named_modules():
        if isinstance(owner, Linear):
            names.append(f"{name}.weight")
        if isinstance(owner, RoutedExperts) and packs_experts:
            names += f"{name}.up", f"{name}.down"
    return [name for name in names if weights.packed_formats(name)]


def placeholder(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """One NaN as all numbers of a parameter whose packed matrix is elsewhere."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)


def pack_decoder(
    decoder: Decoder,
    weights: PackedWeights,
    kernels: QuantizedKernels = REFERENCE_KERNELS,
    *,
    packs_experts: bool = False,
) -> None:
    """Replaces the matrices that are packed and frees their numbers; to be called before cache_attributes().

    kernels: see quantized_kernels(). packs_experts: whether the kernels of steps multiply with packed experts, as torch
    does not.
    """
    device = decoder.embedding.device

    def pack(name: str, parameter: Tensor) -> PackedTensors | None:
        if not weights.packed_formats(name):
            return None
        packed = PackedTensors.of(concatenate(weights.read_packed(name)), tuple(parameter.shape), device)
        _free(parameter)
        return packed

    def product_of(packed: PackedTensors, bias_N: Tensor | None) -> Product:
        bias_N = None if bias_N is None else bias_N.detach()
        return lambda x_TK, _weight, _bias: kernels.packed_product(x_TK, packed, bias_N)

    for name, owner in decoder.named_modules():
        if isinstance(owner, Linear) and (packed := pack(f"{name}.weight", owner.weight)):
            owner.product = product_of(packed, owner.bias)
        if isinstance(owner, RoutedExperts):
            names = f"{name}.up", f"{name}.down"
            if packs_experts:
                packed_experts = PackedExperts(pack(names[0], owner.up), pack(names[1], owner.down))
                owner.packed = packed_experts if any(packed_experts) else None
            else:
                for each, parameter in zip(names, (owner.up, owner.down), strict=True):
                    _dequantize(parameter, weights, each)
    head = decoder.untied_head
    if head is not None and (packed := pack("untied_head", head)):  # padded_lm_head() handles an unquantized head
        decoder.head_product = product_of(packed, decoder.head_bias)


@torch.no_grad()
def _dequantize(parameter: Tensor, weights: PackedWeights, name: str) -> None:
    """In place, one expert after another: all in float32 could take more memory than there is."""
    if weights.packed_formats(name):
        matrix = concatenate(weights.read_packed(name))
        packed = PackedTensors.of(matrix, tuple(parameter.shape), parameter.device)
        for expert, numbers in enumerate(parameter):
            rows = slice(expert * len(numbers), (expert + 1) * len(numbers))
            numbers.copy_(packed.dequantized(numbers.dtype, rows))


def quantize_decoder(decoder: Decoder, kernels: QuantizedKernels = REFERENCE_KERNELS) -> None:
    """Quantizes every matrix to fp8, if it supports the sizes (fits), and frees the original.

    fp8 quantizes activations, too: half the bytes and twice the tensor-core throughput of bfloat16. To be called before
    cache_attributes().
    """
    for owner in decoder.modules():
        if isinstance(owner, Linear):
            owner.product = _fp8_product(owner.weight, owner.bias, kernels)
    if decoder.untied_head is not None:
        decoder.head_product = _fp8_product(decoder.untied_head, decoder.head_bias, kernels)


def _fp8_product(weight: Tensor, bias_N: Tensor | None, kernels: QuantizedKernels) -> Product:
    """x [T, K] -> x W^T + b [T, N]. Takes ownership of the weight [N, K]: quantizing frees the original."""
    if not fits(weight):
        return product
    fp8, bias_N = quantize_fp8_weight(weight), None if bias_N is None else bias_N.detach()
    _free(weight)
    return lambda x_TK, _weight, _bias: fp8_product(kernels.fp8_rows(x_TK), fp8, bias_N, x_TK.dtype)


def _free(weight: Tensor) -> None:
    """Keeps the shape."""
    weight.data = placeholder(tuple(weight.shape), weight.device, weight.dtype)


def fits(weight: Tensor) -> bool:
    """Whether the GPU's product in fp8 supports the sizes of this matrix."""
    return not any(size % FP8_MULTIPLE for size in weight.shape)


def describe_unsupported_by_fp8(decoder: Decoder) -> str | None:
    """Log message about matrices whose sizes fp8 does not support; None if there are none."""
    matrices = list(_matrices(decoder))
    unsupported = [weight for weight in matrices if not fits(weight)]
    if not unsupported:
        return None
    sizes = ", ".join(sorted({f"{rows} x {columns}" for rows, columns in (weight.shape for weight in unsupported)}))
    return (
        f"{len(unsupported)} of {len(matrices)} matrices are not quantized: fp8 requires multiples of {FP8_MULTIPLE}, "
        f"and their sizes are {sizes}"
    )


def _matrices(decoder: Decoder) -> Iterator[Tensor]:
    yield from (owner.weight for owner in decoder.modules() if isinstance(owner, Linear))
    if decoder.untied_head is not None:
        yield decoder.untied_head
