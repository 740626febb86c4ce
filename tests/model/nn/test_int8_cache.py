"""Keys and values as codes of 8 bits, against the definition in plain Python."""

from __future__ import annotations

import math
import random
import struct

import pytest
import torch

from model.cache_formats import KvCache, check_kv_cache, golden_tolerance
from model.nn.int8_cache import decode, encode

SMALLEST = 2.0**-126


def _bits(x: float) -> int:
    number: int = struct.unpack("<I", struct.pack("<f", x))[0]
    return number


def _float(bits: int) -> float:
    number: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return number


def _defined(x: list[float]) -> tuple[list[int], float]:
    """Codes and scale of numbers that are exact in float32."""
    quotient = _bits(_float(_bits(max(map(abs, x)))) / 127)
    scale = _float((quotient + 0x7FFF + (quotient >> 16 & 1)) >> 16 << 16)
    if scale < SMALLEST:
        return [0] * len(x), 0.0
    return [round(_float(_bits(number / scale))) for number in x], scale


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-3, 1.0, 300.0, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_are_those_of_the_definition(dtype: torch.dtype, size: float) -> None:
    rng = random.Random(size)
    x_XC = torch.tensor([[rng.gauss(0, size) for _ in range(20)] for _ in range(200)]).to(dtype)
    codes_XC, scales_X = encode(x_XC)
    for x, codes, scale in zip(x_XC.tolist(), codes_XC.tolist(), scales_X.tolist(), strict=True):
        assert (codes, scale) == _defined(x)
    assert codes_XC.abs().max() == 127 or size < 1e-37
    rounded_XC = decode(codes_XC, scales_X, torch.float32)
    half_steps_X1 = scales_X.float()[:, None] / 2
    assert ((rounded_XC - x_XC.float()).abs() <= half_steps_X1 * (1 + 1e-5) + 127 * SMALLEST).all()


def test_no_code_is_beyond_127() -> None:
    """Scales are rounded, down by up to 2^-8."""
    largest_X = torch.arange(_bits(1.0), _bits(2.0), 97, dtype=torch.int32).view(torch.float32)
    codes_XC, _ = encode(torch.stack([largest_X, -largest_X], 1))
    assert set(codes_XC[:, 0].tolist()) == {127} and set(codes_XC[:, 1].tolist()) == {-127}


def test_numbers_in_the_middle_become_even_codes() -> None:
    codes_XC, scales_X = encode(torch.tensor([[127.0, 0.5, 1.5, -2.5, 3.5]]))
    assert (codes_XC.tolist(), scales_X.tolist()) == ([[127, 0, 2, -2, 4]], [1.0])


def test_zeros_and_numbers_below_the_smallest_scale_are_zeros() -> None:
    codes_XC, scales_X = encode(torch.tensor([[0.0, -0.0], [120 * SMALLEST, 1e-40]]))
    assert not codes_XC.any() and not scales_X.any()
    assert encode(torch.tensor([[127 * SMALLEST]]))[1].item() == SMALLEST


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_makes_the_whole_head_so(bad: float) -> None:
    """And no other: the engine finds the request at fault."""
    x_XC = torch.tensor([[1.0, bad, 2.0], [1.0, 3.0, 2.0]])
    codes_XC, scales_X = encode(x_XC)
    read_XC = decode(codes_XC, scales_X, torch.bfloat16)
    assert read_XC[0].isnan().all() and read_XC[1].isfinite().all()


@pytest.mark.parametrize(("kv_cache", "device"), [("auto", "cuda"), ("auto", "cpu"), ("int8", "cpu"), ("int8", "auto")])
def test_devices_with_the_format_are_accepted(kv_cache: KvCache, device: str) -> None:
    check_kv_cache(kv_cache, device)


def test_gpu_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"^--kv-cache int8 requires a CPU, .*: use --kv-cache auto, or --device cpu$"):
        check_kv_cache("int8", "cuda")


def test_rounding_of_the_cache_adds_to_the_tolerance_of_the_weights() -> None:
    assert golden_tolerance(None, "auto") is None and golden_tolerance(0.1, "auto") == 0.1
    assert golden_tolerance(None, "int8") == 0.05 and golden_tolerance(0.1, "int8") == pytest.approx(0.15)
