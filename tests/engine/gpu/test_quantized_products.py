"""The int8 and fp8 kernels against their references: in Triton's interpreter, or on a GPU if there is one."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import Tensor

from app.engine.gpu.kernels import reference_operations
from app.engine.gpu.kernels.reference_operations import dequantized_product
from app.engine.gpu.triton_loader import quantized_kernels
from app.engine.quantization.int8_weights import Quantized, quantize
from tests.support.gpu.kernel_backends import DEVICE, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return import_module("app.engine.gpu.kernels.triton.quantized_products")


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _whole(*shape: int, seed: int = 0) -> Tensor:
    """Numbers whose products and sums are exact in float32, in whatever order."""
    return _normal(*shape, seed=seed).mul(3).round()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 70, 96), (16, 64, 128), (17, 130, 200), (3, 8, 272)])
def test_the_kernel_gives_what_its_twin_gives(
    kernel: ModuleType, tokens: int, rows: int, columns: int, has_bias: bool
) -> None:
    x, weight, bias = _normal(tokens, columns), quantize(_normal(rows, columns, seed=1)), _normal(rows, seed=2)
    given = bias if has_bias else None
    out = kernel.int8_product(x, weight, given)
    assert torch.allclose(out, dequantized_product(x, weight, given), rtol=1e-5, atol=1e-4)


def test_every_token_of_every_tile_is_computed_from_its_own_row(kernel: ModuleType) -> None:
    """Exact sums, so that a differing bit means a misplaced number; rows of x may be strided."""
    numbers = _whole(130, 200, seed=1).to(torch.int8)
    weight = Quantized(numbers, torch.full((130,), 0.5, device=DEVICE))
    wide = _whole(70, 300)
    together = kernel.int8_product(wide[:, :200], weight, None)
    assert torch.equal(together, wide[:, :200] @ numbers.float().t() * 0.5)
    for few in (1, 16, 17):
        assert torch.equal(kernel.int8_product(wide[:few, :200], weight, None), together[:few])


def test_few_tokens_have_a_tile_of_their_own(kernel: ModuleType) -> None:
    assert [kernel.tile(n)[0] for n in (1, 16, 17, 64, 100_000)] == [16, 16, 64, 64, 64]


@pytest.mark.parametrize("columns", [64, 200])
def test_a_row_is_scaled_by_itself_to_the_bits_of_its_twin(columns: int) -> None:
    """The interpreter loses a carry when it rounds to e4m3, so the kernel is asked for what is to be rounded."""
    kernel = import_module("app.engine.gpu.kernels.triton.quantized_products").quantize_row_kernel
    wide = _normal(5, 300) * torch.tensor([1.0, 1e-6, 1e6, 0.0, 3.0], device=DEVICE)[:, None]
    wide[4, 7] = float("nan")
    numbers, scales = wide.new_empty(5, columns), wide.new_empty(5, 1)
    kernel[(5,)](wide, numbers, scales, 300, N_COLUMNS=columns, PADDED=256, FP8_MAX=reference_operations.FP8_MAX)
    reference = reference_operations.quantize_fp8_rows(wide[:, :columns])
    assert torch.equal(scales[:4], reference.scales_X1[:4])
    assert torch.equal(numbers[:4].to(reference_operations.FP8_DTYPE).float(), reference.numbers[:4].float())
    assert numbers[4, 7].isnan(), "a number that is none must not look like one"


def test_the_door_opens_to_the_kernels_where_there_is_a_gpu(kernel: ModuleType) -> None:
    kernels = quantized_kernels(torch.device("cuda"), torch.bfloat16)
    assert kernels.int8_product is kernel.int8_product
    assert kernels.fp8_rows is import_module("app.engine.gpu.kernels.triton.quantized_products").quantize_fp8_rows
