"""Quantization by groups: errors against bounds and an exhaustive search, laws, and the same bits everywhere."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from model import quantize
from model.number_formats import Array
from model.packed_matrix import PackedMatrix
from model.quantize import LEAST, MOST, QuantizedKind, packed_format, quantized

KINDS: tuple[QuantizedKind, ...] = ("int8", "int4")
DIGESTS = {
    ("int8", 288): "5130a5e80b5397e3",
    ("int8", 48): "801c75d854b6f558",
    ("int4", 288): "20c85ca6994f641d",
    ("int4", 48): "dcbfeb9414ce39ca",
}
"""Of the bytes of a quantized matrix, by kind and columns. `numerics` names these bits: other bits need another name in
model/weight_formats.py."""


def _numbers(rows: int, columns: int, seed: int = 0) -> Array:
    """About normally distributed, from integers alone: no library's logarithm decides about their bits."""
    dice = np.random.default_rng(seed).integers(0, 256, (8, rows, columns))
    numbers: Array = ((dice.sum(axis=0) - 1020) / 4096).astype(np.float32)
    return numbers


def _digest(matrix: PackedMatrix) -> str:
    of_groups = [numbers for numbers in (matrix.scales, matrix.offsets) if numbers]
    arrays = [matrix.codes, *(array for numbers in of_groups for array in (numbers.values, numbers.units))]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays if array is not None)).hexdigest()[:16]


def _errors(matrix: PackedMatrix, numbers: Array) -> Array:
    """Squared error of each group [R, G]."""
    errors = (matrix.dequantized("float32").astype(np.float64) - numbers) ** 2
    summed: Array = errors.reshape(len(numbers), -1, matrix.format.group).sum(axis=2)
    return summed


@pytest.mark.parametrize(
    ("kind", "columns", "group", "bits"),
    [("int8", 512, 32, 8.5), ("int8", 48, 16, 9.0), ("int4", 512, 32, 4.625), ("int4", 768 + 16, 16, None)],
)
def test_groups_have_32_columns_where_these_divide_a_row(
    kind: QuantizedKind, columns: int, group: int, bits: float | None
) -> None:
    matrix = quantized(_numbers(3, columns), kind)
    assert matrix.format == packed_format(columns, kind) and matrix.format.group == group
    assert bits is None or 8 * matrix.format.n_bytes(3, columns) == bits * 3 * columns
    matrix.check()


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_no_group_divides_have_no_format(kind: QuantizedKind) -> None:
    assert [columns for columns in range(1, 130) if packed_format(columns, kind)] == [*range(16, 130, 16)]


@pytest.mark.parametrize("columns", [288, 48])
def test_int8_is_off_by_half_a_step_at_most(columns: int) -> None:
    numbers = _numbers(40, columns) * np.float32(2.0) ** np.arange(-3, 17, 0.5, dtype=np.float32)[:, None]
    matrix = quantized(numbers, "int8")
    steps = np.repeat(matrix.scales.numbers(matrix.format.group), matrix.format.group, axis=1)
    assert (np.abs(matrix.dequantized("float32") - numbers) <= steps * (0.5 + 1e-5)).all()
    largest = np.abs(matrix.codes).reshape(40, -1, matrix.format.group).max(axis=2)
    assert (largest >= 126).all() and largest.max() == 127


@pytest.mark.parametrize(("columns", "more"), [(288, 1.06), (48, 1.15)])
def test_int4_loses_little_more_than_an_exhaustive_search(columns: int, more: float) -> None:
    """Which tries every pair of bytes near each group's own, with the same units."""
    numbers = _numbers(4, columns)
    matrix = quantized(numbers, "int4")
    ours, least = _errors(matrix, numbers), np.inf
    assert matrix.offsets
    for scale in range(-60, 61, 3):
        for offset in range(-60, 61, 5):
            scales, offsets = (
                replace(of, values=np.clip(of.values.astype(int) + change, *limits).astype(of.values.dtype))
                for of, change, limits in ((matrix.scales, scale, (0, 255)), (matrix.offsets, offset, (-127, 127)))
            )
            trial = replace(matrix, scales=scales, offsets=offsets)
            steps = np.abs(_levels(trial) - numbers[..., None]).min(axis=-1)
            least = np.minimum(least, (steps**2).reshape((*ours.shape, -1)).sum(axis=-1))
    assert (ours <= 2 * least).all() and least.sum() < ours.sum() < more * least.sum()


def _levels(matrix: PackedMatrix) -> Array:
    """float64 [R, C, 16]: the numbers that each weight might be."""
    assert matrix.offsets
    group = matrix.format.group
    scales, offsets = (
        np.repeat(of.numbers(group), group, axis=1).astype(np.float64)[..., None]
        for of in (matrix.scales, matrix.offsets)
    )
    levels: Array = scales * np.arange(16) + offsets
    return levels


@pytest.mark.parametrize("columns", [288, 48])
def test_every_number_of_int4_has_the_level_next_to_it(columns: int) -> None:
    numbers = _numbers(9, columns)
    matrix = quantized(numbers, "int4")
    best = np.abs(_levels(matrix) - numbers[..., None]).min(axis=-1)
    assert np.allclose(np.abs(matrix.dequantized("float32") - numbers), best, rtol=1e-3, atol=1e-7)


def test_int4_loses_less_than_the_best_float16_scale_does() -> None:
    """For the integers from -8 to 7: the best of 400 scales of each group of 32 columns."""
    numbers = _numbers(16, 512)
    by_group = numbers.reshape(-1, 32).astype(np.float64)
    least = np.full(len(by_group), np.inf)
    for place in np.linspace(5, 11, 200):
        scales = np.abs(by_group).max(axis=1, keepdims=True) / place
        for signed in (scales, -scales):
            levels = np.clip(np.rint(by_group / signed), -8, 7) * signed
            least = np.minimum(least, ((levels - by_group) ** 2).sum(axis=1))
    assert _errors(quantized(numbers, "int4"), numbers).sum() < 0.8 * least.sum()


@pytest.mark.parametrize("columns", [288, 48])
def test_weights_trained_for_4_bits_keep_their_places(columns: int) -> None:
    """Integers from -8 to 7 times a scale for each group, and 0 to 15 with a minimum."""
    random = np.random.default_rng(3)
    shape = (20, columns // 16, 16)
    scales = random.uniform(0.01, 0.02, shape[:2]).astype(np.float16).astype(np.float32)[..., None]
    for least in (np.float32(-8), random.uniform(-12, -4, scales.shape).astype(np.float32)):
        codes = random.integers(0, 16, shape)
        codes[..., :2] = 0, 15
        if columns == 288:  # of 32 columns
            scales[:, 1::2], least = scales[:, ::2], np.broadcast_to(least, scales.shape).copy()
            least[:, 1::2] = least[:, ::2]
        numbers = (scales * (codes + least)).astype(np.float32).reshape(20, columns)
        loss = _errors(quantized(numbers, "int4"), numbers).sum() / (numbers.astype(np.float64) ** 2).sum()
        assert loss < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_powers_of_two_pass_through(kind: QuantizedKind) -> None:
    numbers = _numbers(20, 288)
    large, larger = (quantized(numbers * np.float32(factor), kind).dequantized("float32") for factor in (256, 4096))
    assert np.array_equal(larger, 16 * large)
    flipped = quantized(-numbers, kind)
    assert np.isclose(_errors(flipped, -numbers).sum(), _errors(quantized(numbers, kind), numbers).sum(), rtol=0.01)


def test_a_group_of_one_number_keeps_it() -> None:
    numbers = np.repeat(_numbers(8, 16), 32, axis=1)
    found = quantized(numbers, "int4").dequantized("float32")
    assert np.abs(found - numbers).max() < np.abs(numbers).max() / 250


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_quantized_apart_by_any_number_of_threads(
    kind: QuantizedKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = _numbers(37, 288)
    whole = quantized(numbers, kind, threads=1)
    assert _digest(quantized(numbers[5:6], kind)) == _digest(whole.take(slice(5, 6)))
    monkeypatch.setattr(quantize, "_PIECE", 5 * 288)
    assert _digest(quantized(numbers, kind, threads=3)) == _digest(whole)


@pytest.mark.parametrize(("kind", "columns"), DIGESTS)
def test_bits_are_the_same_on_every_machine(kind: QuantizedKind, columns: int) -> None:
    assert _digest(quantized(_numbers(50, columns), kind)) == DIGESTS[kind, columns]


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_negligible_numbers_become_zeros(kind: QuantizedKind) -> None:
    numbers = _numbers(6, 288)
    numbers[0], numbers[1, :32], numbers[2, :32], numbers[3, :32] = 0, 1e-45, -1e-13, 3e-39
    numbers[4, 7] = 1e-40
    matrix = quantized(numbers, kind)
    matrix.check()
    dequantized = matrix.dequantized("float32")
    assert not dequantized[0].any() and not dequantized[1:4, :32].any()
    assert _errors(matrix, numbers)[4:].sum() < 0.01 * (numbers[4:] ** 2).sum()
    assert not quantized(np.zeros((2, 64), np.float32), kind).dequantized("float32").any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("largest", [LEAST, 1e-3, 1.0, MOST])
def test_sizes_within_the_limits_lose_as_little(kind: QuantizedKind, largest: float) -> None:
    numbers = _numbers(16, 288)
    numbers *= np.float32(largest / np.abs(numbers).max())
    numbers = np.clip(numbers, -largest, largest).astype(np.float32)
    matrix = quantized(numbers, kind)
    matrix.check()
    error = _errors(matrix, numbers).sum() / (numbers.astype(np.float64) ** 2).sum()
    assert error < (5e-5 if kind == "int8" else 0.0075)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (np.inf, "not finite"),
        (np.nan, "not finite"),
        (1e30, "1e\\+30 as its largest number"),
        (-5e6, "5e\\+06 as its largest number"),
        (3e-5, "3e-05 as its largest number, and quantization needs one from 6.1e-05 to 4.2e\\+06"),
    ],
)
def test_numbers_that_float16_scales_cannot_hold_are_refused(kind: QuantizedKind, number: float, reason: str) -> None:
    numbers = np.zeros((2, 64), np.float32)
    numbers[1, 3] = number
    with pytest.raises(ValueError, match=reason):
        quantized(numbers, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_bounded_whatever_the_size(kind: QuantizedKind) -> None:
    numbers = np.tile(_numbers(64, 2048), (32, 1))
    tracemalloc.start()
    try:
        matrix = quantized(numbers, kind, threads=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < matrix.format.n_bytes(*numbers.shape) + (16 << 20)
