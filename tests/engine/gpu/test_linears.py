"""Matrix products with packed matrices and in fp8: accuracy, batch invariance, freed memory, refusals.

Kernels against their references run in Triton's interpreter, or on a GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.execution.warmup_batches import dummies
from app.engine.gpu.linears import describe_unsupported_by_fp8, pack_decoder, packed_names, quantize_decoder
from app.engine.gpu.triton_loader import REFERENCE_KERNELS, quantized_kernels
from app.engine.quantization import quantized_weights as references
from app.engine.quantization.quantized_weights import packed_product
from app.engine.startup_checks import check_golden
from model.checkpoint.golden import GOLDEN_FILE
from model.checkpoint.golden_export import golden_file
from model.config import ModelConfig
from model.files import CheckpointError
from model.nn.layers import Linear
from model.nn.packed_tensors import PackedTensors
from model.nn.reference import logits
from model.nn.transformer import Decoder
from model.packed_matrix import GroupNumbers, PackedFormat, PackedMatrix
from model.quantize import QuantizedKind, packed_kind, quantized
from model.weight_formats import QUANTIZE
from tests.support.gpu.emulated_engine import tiny_device_runner
from tests.support.gpu.kernel_backends import DEVICE, needs_triton
from tests.support.model.packed_matrices import FORMATS, random_packed
from tests.support.model.tiny_models import (
    mixture_config,
    quantized_weights,
    round_weights,
    tiny_config,
    tiny_decoder,
    tiny_engine,
)

TRITON = "app.engine.gpu.kernels.triton.quantized_products"
PROMPT = [(7 * i) % 319 + 1 for i in range(40)]
UNTIED = tiny_config(tied_head=False, head_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True, logit_soft_cap=30.0)
QUANTIZED = [kind for kind in QUANTIZE if kind != "none"]
MEAN_ERROR = {"int8": 0.009, "int4": 0.09, "fp8": 0.06}
"""Of outputs, as a share of their mean size: e4m3 has 3 bits of mantissa, so that a number is off by 2 to 3 %."""
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _packed(weight: Tensor, kind: QuantizedKind) -> PackedTensors:
    return PackedTensors.of(quantized(weight.float().numpy(), kind), tuple(weight.shape), CPU)


def _product(weight: Tensor, bias: Tensor | None, kind: str) -> Callable[[Tensor], Tensor]:
    """The product of a decoder's layer."""
    if kind != "fp8":
        return lambda x: packed_product(x, _packed(weight, kind), bias)  # type: ignore[arg-type]
    fp8 = references.quantize_fp8_weight(weight)
    return lambda x: references.fp8_product(references.quantize_fp8_rows(x), fp8, bias, x.dtype)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", QUANTIZED)
def test_every_format_is_close_to_the_exact_product(kind: str, has_bias: bool) -> None:
    weight, x, bias = _normal(48, 64), _normal(5, 64, seed=1), _normal(48, seed=2) if has_bias else None
    exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    out = _product(weight, bias, kind)(x)
    assert (out.shape, out.dtype) == (exact.shape, torch.bfloat16)
    error = (out.float() - exact).abs().mean() / exact.abs().mean()
    assert 0 < error < MEAN_ERROR[kind]


@pytest.mark.parametrize("kind", QUANTIZED)
def test_row_does_not_depend_on_others(kind: str) -> None:
    """Few bits and a power of two as the scale: every sum is exact in any order."""
    weight = _normal(32, 64).mul(2).round().clamp(-7, 7)
    weight[:, ::32] = {"fp8": 7, "int8": 127, "int4": -8}[kind]
    weight[:, 1::32] = 7
    x = _normal(9, 64, seed=1).mul(2).round().clamp(-7, 7)
    x[:, 0] = 7
    linear = _product(weight, None, kind)
    together = linear(x)
    assert torch.equal(linear(x.flip(0)).flip(0), together)
    assert torch.equal(torch.cat([linear(row[None]) for row in x]), together)
    x[3] *= 1e4
    others = [row for row in range(9) if row != 3]
    assert torch.equal(linear(x)[others], together[others]), "a neighbor with large values"


def test_rows_are_rounded_to_nearest_with_a_scale_per_row() -> None:
    x = torch.cat((_normal(3, 64, dtype=torch.float32) * torch.tensor([[1.0], [1e-4], [1e4]]), torch.zeros(1, 64)))
    numbers, scales = references.quantize_fp8_rows(x)
    assert numbers.dtype == torch.float8_e4m3fn
    assert torch.equal(numbers.float().abs().amax(1), torch.tensor([448.0, 448.0, 448.0, 0.0]))
    error = (numbers.float() * scales - x).abs()
    assert (error <= x.abs() / 16 + scales / 512).all(), "half a step of 3 bits, or of the smallest number"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_row_affects_only_itself(bad: float) -> None:
    x = _normal(3, 64)
    x[1, 5] = bad
    out = _product(_normal(32, 64, seed=1), None, "fp8")(x)
    assert not torch.isfinite(out[1]).any()
    assert torch.isfinite(out[[0, 2]]).all()


def test_results_in_pieces_equal_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 rounds a weight in pieces, and the reference of packed products dequantizes it in pieces."""
    weight, x, bias = _normal(50, 64), _normal(3, 64, seed=1), _normal(50, seed=2)

    def both() -> tuple[Tensor, ...]:
        fp8 = references.quantize_fp8_weight(weight)
        return fp8.numbers.float(), fp8.scales_X1, packed_product(x, _packed(weight, "int8"), bias).float()

    whole = both()
    monkeypatch.setattr(references, "_CHUNK_NUMBERS", 64 * 7)
    assert all(torch.allclose(a, b, rtol=2**-7) for a, b in zip(both(), whole, strict=True))


def test_torch_product_accepts_our_layouts() -> None:
    """torch has this product for CPUs, too, with the same arguments, so the layouts for a GPU are tested here."""
    x = references.quantize_fp8_rows(_normal(5, 64))
    weight = references.quantize_fp8_weight(_normal(48, 64, seed=1))
    for bias in (_normal(48, seed=2), None):
        ours = references.fp8_product(x, weight, bias, torch.float32)
        torchs = references.scaled_product(x, weight, bias, torch.bfloat16)
        assert torch.allclose(torchs.float(), ours, rtol=2**-7, atol=1e-2)


@needs_triton
def test_triton_kernels_are_used_on_gpus_with_16_bit_formats_only() -> None:
    assert quantized_kernels(torch.device("cpu"), torch.bfloat16) is REFERENCE_KERNELS
    assert quantized_kernels(torch.device("cuda"), torch.float32) is REFERENCE_KERNELS
    kernels, triton = quantized_kernels(torch.device("cuda"), torch.bfloat16), import_module(TRITON)
    assert (kernels.packed_product, kernels.fp8_rows) == (triton.packed_product, triton.quantize_fp8_rows)


@pytest.mark.parametrize("packed_format", FORMATS, ids=str)
def test_tensors_stand_for_the_numbers_of_their_matrix(packed_format: PackedFormat) -> None:
    matrix = random_packed(packed_format, rows=6, columns=384, seed=1)
    tensors = PackedTensors.of(matrix, (2, 3, 384), CPU)
    wide = matrix.dequantized("float32")
    assert torch.equal(tensors.dequantized(torch.float32), torch.from_numpy(wide))
    assert torch.equal(tensors.dequantized(torch.bfloat16, slice(3, 6)), torch.from_numpy(wide[3:]).bfloat16())


def _exact(packed_format: PackedFormat, rows: int, columns: int) -> PackedTensors:
    """Scales and offsets are small multiples of powers of two, so that sums of products are exact in float32."""
    matrix = random_packed(packed_format, rows=rows, columns=columns, seed=rows)

    def few_bits(numbers: GroupNumbers | None) -> GroupNumbers | None:
        if numbers is None:
            return None
        places = np.arange(numbers.values.size).reshape(numbers.values.shape)
        units = (
            None if numbers.units is None else np.exp2(np.arange(numbers.units.size) % 2).reshape(numbers.units.shape)
        )
        return GroupNumbers(
            values=(places % 3 + 1).astype(numbers.values.dtype),
            units=None if units is None else units.astype(np.float16),
        )

    scales = few_bits(matrix.scales)
    assert scales
    exact: PackedMatrix = replace(matrix, scales=scales, offsets=few_bits(matrix.offsets))
    return PackedTensors.of(exact, (rows, columns), DEVICE)


@needs_triton
@pytest.mark.parametrize(("rows", "columns"), [(130, 256), (130, 1152), (8, 1152), (70, 128)])
@pytest.mark.parametrize("packed_format", FORMATS, ids=str)
def test_every_token_of_every_tile_is_computed_from_its_own_row(
    packed_format: PackedFormat, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are exact, so a differing bit is a misplaced number. 1,152 columns need splits."""
    kernel, float32 = import_module(TRITON), torch.float32
    weight, bias = _exact(packed_format, rows, columns), torch.arange(rows).to(DEVICE).float()
    x = _normal(70, columns + 100, dtype=float32).mul(4).round().to(DEVICE)[:, :columns]  # its rows may be strided
    exact = x @ weight.dequantized(float32).t()
    assert torch.equal(packed_product(x, weight, bias), exact + bias)
    for few in (1, 16, 64):
        assert torch.equal(kernel.packed_product(x[:few], weight, None), exact[:few])
    assert torch.equal(kernel.packed_product(x[:17], weight, bias), exact[:17] + bias)
    monkeypatch.setattr(kernel, "_PIECE_BYTES", 50 * 4 * columns)
    assert torch.equal(kernel.packed_product(x, weight, None), exact), "pieces of 50 rows"
    assert torch.equal(kernel.packed_product(x, weight, bias), exact + bias)


@needs_triton
@pytest.mark.parametrize("packed_format", FORMATS, ids=str)
def test_dequantized_weight_has_the_bits_of_the_reference(
    packed_format: PackedFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product with an identity matrix is the dequantized weight. 640 columns: three programs per row.

    The interpreter rounds the product and the sum of an fma, so that float32 scales may be off by their last bit.
    """
    kernel, half = import_module(TRITON), torch.float16
    matrix = random_packed(packed_format, rows=5, columns=640, seed=2)
    weight = PackedTensors.of(matrix, (5, 640), DEVICE)
    monkeypatch.setattr(kernel, "_PIECE_BYTES", 2 * 2 * 640)
    found = kernel.product_by_pieces(torch.eye(640, dtype=half, device=DEVICE), weight, None).t()
    expected = weight.dequantized(half)
    if packed_format.scales == "float32" and DEVICE == "cpu":
        assert (found != expected).float().mean() < 0.02 and torch.allclose(found, expected, rtol=2**-10, atol=1e-6)
    else:
        assert torch.equal(found, expected)


@needs_triton
def test_columns_of_a_matrix_with_few_rows_are_split_by_its_size() -> None:
    """Columns are split by the matrix size, not by tokens: 4,096 x 4,096 alone would occupy half of a Hopper GPU."""
    kernel = import_module(TRITON)
    sizes = ((4096, 4096), (4096, 14_336), (28_672, 4096), (6144, 4096), (64, 600), (64, 96))
    columns = [kernel.split_columns(*each) for each in sizes]
    assert [-(-n // size) for (_, n), size in zip(sizes, columns, strict=True)] == [5, 5, 1, 3, 2, 1]
    assert all(size % kernel.BLOCK_K == 0 for size in columns)
    assert [kernel.tile(n)[0] for n in (1, 16, 17, 64)] == [16, 16, 64, 64]


@needs_triton
@pytest.mark.parametrize("columns", [64, 200])
def test_row_scaling_has_the_bits_of_the_reference(columns: int) -> None:
    """The interpreter loses a carry when it rounds to e4m3, so the kernel returns the values before rounding."""
    wide = _normal(5, 300, dtype=torch.float32) * torch.tensor([1.0, 1e-6, 1e6, 0.0, 3.0])[:, None]
    wide[4, 7] = float("nan")
    wide = wide.to(DEVICE)
    numbers, scales = wide.new_empty(5, columns), wide.new_empty(5, 1)
    kernel, sizes = import_module(TRITON).quantize_row_kernel, {"N_COLUMNS": columns, "PADDED": 256}
    kernel[(5,)](wide, numbers, scales, 300, FP8_MAX=references.FP8_MAX, **sizes)
    reference = references.quantize_fp8_rows(wide[:, :columns])
    assert torch.equal(scales[:4], reference.scales_X1[:4])
    assert torch.equal(numbers[:4].to(references.FP8_DTYPE).float(), reference.numbers[:4].float())
    assert numbers[4, 7].isnan(), "NaN must not look like a number"


def _quantized(shape: ModelConfig, kind: str, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = tiny_decoder(shape, dtype=dtype)
    packed: QuantizedKind | None = packed_kind(kind)  # type: ignore[arg-type]
    if packed:
        pack_decoder(decoder, quantized_weights(decoder, packed))
    else:
        quantize_decoder(decoder)
    return decoder


@pytest.mark.parametrize("kind", get_args(QuantizedKind))
@pytest.mark.parametrize("shape", [tiny_config(), UNTIED, tiny_config(n_encoder_layers=1), mixture_config()])
def test_packed_decoder_equals_one_with_rounded_weights(shape: ModelConfig, kind: QuantizedKind) -> None:
    rounded = round_weights(tiny_decoder(shape), kind, embedding=False)  # on a GPU it is not quantized
    source = PROMPT if shape.n_encoder_layers else None
    ours = logits(_quantized(shape, kind), PROMPT, source=source)
    assert torch.allclose(ours, logits(rounded, PROMPT, source=source), rtol=1e-3, atol=2e-3)
    assert not torch.allclose(ours, logits(tiny_decoder(shape), PROMPT, source=source), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", get_args(QuantizedKind))
@pytest.mark.parametrize("width", [48, 40])
def test_experts_of_gpu_kernels_stay_packed_and_compute_what_rounded_ones_do(kind: QuantizedKind, width: int) -> None:
    """Close to torch's experts, which have the same numbers, and not to those before. No group divides 40 columns."""
    config = mixture_config(width=width, bias=True, shared_width=33)
    rounded, packed = _quantized(config, kind), tiny_decoder(config)
    pack_decoder(packed, quantized_weights(packed, kind), packs_experts=True)
    ours = _step_logits(packed)
    assert torch.allclose(ours, _step_logits(rounded), rtol=1e-3, atol=2e-3)
    assert not torch.allclose(ours, _step_logits(tiny_decoder(config)), rtol=1e-3, atol=2e-3)
    kept = {name: each for name, each in packed.named_parameters() if ".experts." in name and each.ndim == 3}
    freed = [name for name, each in kept.items() if each.untyped_storage().nbytes() <= 4 and each.isnan().all()]
    assert freed == [name for name in kept if width == 48 or name.endswith("up")] and len(kept) == 4
    with pytest.raises(AssertionError, match="packed experts"):
        logits(packed, PROMPT)


def _step_logits(decoder: Decoder) -> Tensor:
    """Logits [1, V] after a prompt, by the steps of a GPU."""
    runner = tiny_device_runner(decoder)
    runner.run(dummies(1, len(PROMPT)))
    executor = runner.graphs.executor
    return executor.decoder.head(executor._hidden_TD[:1]).clone()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_weights_are_freed_but_counted_as_parameters(kind: str) -> None:
    decoder = _quantized(tiny_config(tied_head=False), kind)
    kept = {name: each for name, each in decoder.named_parameters() if each.untyped_storage().nbytes() > 4}
    assert [name for name, each in kept.items() if each.ndim == 2] == ["embedding"]
    assert all(each.isnan().all() for name, each in decoder.named_parameters() if name not in kept)
    assert decoder.n_params == tiny_decoder(tiny_config(tied_head=False)).n_params


def test_matrices_unsupported_by_fp8_are_logged() -> None:
    assert describe_unsupported_by_fp8(tiny_decoder(tiny_config(mlp_width=168))) == (
        "2 of 8 matrices are not quantized: fp8 requires multiples of 16, and their sizes are 64 x 168"
    )
    assert describe_unsupported_by_fp8(tiny_decoder()) is None


@pytest.mark.parametrize("kind", get_args(QuantizedKind))
def test_matrices_that_no_group_divides_keep_their_numbers(kind: QuantizedKind) -> None:
    odd = _quantized(tiny_config(mlp_width=168), kind)
    linears = {name: owner for name, owner in odd.named_modules() if isinstance(owner, Linear)}
    dense = [name for name, owner in linears.items() if not owner.weight.isnan().any()]
    assert dense == [name for name in linears if name.endswith("mlp.down")] and len(dense) == 2


@pytest.mark.parametrize("is_same", [True, False])
def test_fp8_passes_the_golden_check_and_another_model_fails(tmp_path: Path, is_same: bool) -> None:
    (tmp_path / GOLDEN_FILE).write_bytes(golden_file(tiny_decoder(), PROMPT))
    shape = tiny_config() if is_same else tiny_config(norm_eps=5.0)
    engine = tiny_engine(_quantized(shape, "fp8", torch.bfloat16))
    with nullcontext() if is_same else pytest.raises(CheckpointError, match=r"golden\.json: .* differ by a mean of \d"):
        assert "passed" in check_golden(engine, tmp_path, tiny_config(), context=256, number_format="fp8")


def test_parameters_that_no_product_takes_are_not_packed() -> None:
    """Lookups and routers: a placeholder would stay in their place."""
    config = replace(mixture_config(), positions="learned")

    class AllPacked:
        """Weights of which every matrix is packed."""

        read = read_packed = None

        def packed_formats(self, _name: str) -> tuple[tuple[PackedFormat, int], ...]:
            """See PackedWeights."""
            return ((FORMATS[0], 1),)

    weights: Any = AllPacked()
    for packs_experts in (False, True):
        names = packed_names(weights, config, packs_experts=packs_experts)
        assert not {"embedding", "position_embedding"} & {*names} and not any("router" in name for name in names)
        assert any("attention.qkv.weight" in name for name in names)
        assert any(".experts." in name for name in names) == packs_experts
