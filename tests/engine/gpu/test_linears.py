"""Matrix products in int8 and fp8: close to the exact ones, batch invariant, refused where unsupported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.gpu.kernels import reference_operations
from app.engine.gpu.kernels.reference_operations import dequantized_product
from app.engine.gpu.linears import Quantize, check_quantize, quantized_product
from app.engine.gpu.triton_loader import REFERENCE_KERNELS, quantized_kernels
from app.engine.quantization.int8_weights import quantize

KINDS: list[Quantize] = ["int8", "fp8"]
MEAN_ERROR = {"int8": 0.015, "fp8": 0.06}
"""Of outputs, as a share of their mean size: e4m3 has 3 bits of mantissa, so that a number is off by 2 to 3 %."""
pytestmark = pytest.mark.usefixtures("one_thread")


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _product(weight: Tensor, bias: Tensor | None, kind: Quantize) -> Callable[[Tensor], Tensor]:
    product = quantized_product(weight, bias, kind)
    assert product
    return lambda x: product(x, weight, bias)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_near_the_exact_product(kind: Quantize, has_bias: bool) -> None:
    weight, x, bias = _normal(48, 64), _normal(5, 64, seed=1), _normal(48, seed=2) if has_bias else None
    exact = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    out = _product(weight, bias, kind)(x)
    assert (out.shape, out.dtype) == (exact.shape, torch.bfloat16)
    error = (out.float() - exact).abs().mean() / exact.abs().mean()
    assert 0 < error < MEAN_ERROR[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_takes_the_weight_over(kind: Quantize) -> None:
    weight = _normal(32, 32)
    _product(weight, None, kind)
    assert weight.untyped_storage().nbytes() <= 4 and weight.isnan().all(), "the numbers are there twice"
    assert weight.shape == (32, 32)


@pytest.mark.parametrize(("shape", "kind"), [((40, 64), "fp8"), ((64, 40), "fp8"), ((64, 64), "none")])
def test_a_matrix_that_is_not_quantized_stays_as_it_is(shape: tuple[int, int], kind: Quantize) -> None:
    weight = _normal(*shape)
    assert quantized_product(weight, None, kind) is None
    assert torch.equal(weight, _normal(*shape))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_see_the_others(kind: Quantize) -> None:
    """Whole numbers below 8 and a scale that is a power of two: every sum is exact, in whatever order."""
    weight = _normal(32, 64).mul(2).round().clamp(-7, 7)
    weight[:, 0] = 127 if kind == "int8" else 7
    x = _normal(9, 64, seed=1).mul(2).round().clamp(-7, 7)
    x[:, 0] = 7
    linear = _product(weight, None, kind)
    together = linear(x)
    assert torch.equal(linear(x.flip(0)).flip(0), together)
    assert torch.equal(torch.cat([linear(row[None]) for row in x]), together)
    x[3] *= 1e4
    others = [row for row in range(9) if row != 3]
    assert torch.equal(linear(x)[others], together[others]), "a loud neighbour"


def test_rows_are_rounded_to_the_nearest_with_a_scale_of_their_own() -> None:
    x = torch.cat((_normal(3, 64, dtype=torch.float32) * torch.tensor([[1.0], [1e-4], [1e4]]), torch.zeros(1, 64)))
    numbers, scales = reference_operations.quantize_fp8_rows(x)
    assert numbers.dtype == torch.float8_e4m3fn
    assert torch.equal(numbers.float().abs().amax(1), torch.tensor([448.0, 448.0, 448.0, 0.0]))
    error = (numbers.float() * scales - x).abs()
    assert (error <= x.abs() / 16 + scales / 512).all(), "half a step of 3 bits, or of the smallest number"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_spoils_itself_alone(bad: float) -> None:
    x = _normal(3, 64)
    x[1, 5] = bad
    out = _product(_normal(32, 64, seed=1), None, "fp8")(x)
    assert not torch.isfinite(out[1]).any()
    assert torch.isfinite(out[[0, 2]]).all()


def test_a_weight_is_rounded_piece_by_piece_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _normal(50, 64)
    whole = reference_operations.quantize_fp8_weight(weight)
    monkeypatch.setattr(reference_operations, "_CHUNK_NUMBERS", 64 * 7)
    pieces = reference_operations.quantize_fp8_weight(weight)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(whole, pieces, strict=True))


@pytest.mark.parametrize("is_public", [True, False])
def test_the_products_of_torch_take_what_they_are_given(is_public: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has both for CPUs too, with the same arguments: the layouts that a GPU is given are tried here."""
    if is_public and not hasattr(F, "scaled_mm"):
        pytest.skip("this torch has no public name for it")
    if not is_public:
        monkeypatch.delattr(F, "scaled_mm", raising=False)
    x, weight, bias = (
        reference_operations.quantize_fp8_rows(_normal(5, 64)),
        reference_operations.quantize_fp8_weight(_normal(48, 64, seed=1)),
        _normal(48, seed=2),
    )
    for each in (bias, None):
        ours = reference_operations.fp8_product(x, weight, each, torch.float32)
        torchs = reference_operations.scaled_product(x, weight, each, torch.bfloat16)
        assert torch.allclose(torchs.float(), ours, rtol=2**-7, atol=1e-2)


def test_fp8_is_refused_where_it_cannot_be() -> None:
    bfloat16 = torch.bfloat16
    check_quantize("fp8", "cuda", bfloat16, (8, 9))
    check_quantize("fp8", "cuda", bfloat16, (12, 0))
    check_quantize("int8", "cpu", torch.float32)
    for device, dtype, capability, reason in [
        ("cpu", bfloat16, None, "requires a GPU, and the device is cpu: use --quantize int8 or none"),
        ("cuda", bfloat16, (8, 6), r"capability 8\.9 or newer .* has 8\.6: use --quantize int8 or none"),
        ("cuda", torch.float32, (9, 0), "computes in bfloat16: use --dtype bfloat16 or auto"),
    ]:
        with pytest.raises(ValueError, match=f"^--quantize fp8 {reason}|{reason}$"):
            check_quantize("fp8", device, dtype, capability)


def test_the_twin_of_int8_widens_piece_by_piece_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, bias = quantize(_normal(50, 64)), _normal(3, 64, seed=1), _normal(50, seed=2)
    whole = dequantized_product(x, weight, bias)
    monkeypatch.setattr(reference_operations, "_CHUNK_NUMBERS", 64 * 16)
    assert torch.allclose(dequantized_product(x, weight, bias).float(), whole.float(), rtol=2**-7)


def test_without_a_gpu_the_twins_compute() -> None:
    assert quantized_kernels(torch.device("cpu"), torch.bfloat16) is REFERENCE_KERNELS
    assert quantized_kernels(torch.device("cuda"), torch.float32) is REFERENCE_KERNELS
