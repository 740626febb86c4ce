"""Packed matrices: their numbers, rounded once, and what changes their storage but no number."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from model.number_formats import as_float32, rounded_to_bfloat16
from model.packed_matrix import (
    GROUPS,
    SIGNED_CODES,
    UNIT_COLUMNS,
    UNSIGNED_CODES,
    GroupNumbers,
    PackedFormat,
    common_format,
    concatenate,
)
from tests.support.model.packed_matrices import FORMATS, random_packed


@pytest.mark.parametrize("packed_format", FORMATS, ids=str)
def test_each_number_is_rounded_once(packed_format: PackedFormat) -> None:
    matrix = random_packed(packed_format, rows=3, columns=384, seed=1)
    numbers, integers = matrix.dequantized("float32"), matrix.integers()
    scales = matrix.scales.numbers(packed_format.group)
    for row, column in [(0, 0), (1, 17), (2, 383), (2, 255), (1, 256)]:
        of_group = column // packed_format.group
        exact = Fraction(float(scales[row, of_group])) * int(integers[row, column])
        if matrix.offsets is not None:
            exact += Fraction(float(matrix.offsets.numbers(packed_format.group)[row, of_group]))
        assert numbers[row, column] == np.float32(np.float64(exact.numerator / exact.denominator))
    assert np.array_equal(matrix.dequantized("bfloat16"), rounded_to_bfloat16(numbers))


def test_products_of_large_multiples_are_not_rounded_before_an_offset_is_added() -> None:
    """A byte without a sign times a unit of 11 bits times an integer of 8 bits has more bits than float32."""
    packed_format = PackedFormat(bits=8, group=16, scales="multiples", has_offsets=True)
    matrix = random_packed(packed_format, rows=8, columns=512, seed=3)
    random = np.random.default_rng(4)
    values = random.integers(129, 256, (8, 32), np.uint8)
    units = random.uniform(0.0001, 0.0002, (8, 2)).astype(np.float16)
    matrix = replace(matrix, scales=GroupNumbers(values=values, units=units))
    assert matrix.offsets is not None
    scales, offsets = (
        each.numbers(16).astype(np.float64).repeat(16, axis=1) for each in (matrix.scales, matrix.offsets)
    )
    exact = matrix.integers() * scales + offsets
    assert np.array_equal(matrix.dequantized("float32"), exact.astype(np.float32))
    twice = (matrix.integers() * scales).astype(np.float32) + offsets.astype(np.float32)
    assert not np.array_equal(twice, exact.astype(np.float32)), "positive control"


@pytest.mark.parametrize("packed_format", FORMATS, ids=str)
def test_scales_and_offsets_belong_to_their_group(packed_format: PackedFormat) -> None:
    matrix = random_packed(packed_format, rows=2, columns=512, seed=2)
    group, unit = packed_format.group, 300 // UNIT_COLUMNS
    values = matrix.scales.values.copy()
    values[1, 300 // group] = 0
    changed = replace(matrix, scales=replace(matrix.scales, values=values))
    differs = (changed.dequantized("float32") != matrix.dequantized("float32")).any(axis=0)
    first = 300 // group * group
    assert differs.any() and not differs[:first].any() and not differs[first + group :].any()
    if matrix.scales.units is not None:
        units = matrix.scales.units.copy()
        units[0, unit] *= 2
        changed = replace(matrix, scales=replace(matrix.scales, units=units))
        differs = (changed.dequantized("float32") != matrix.dequantized("float32")).any(axis=0)
        assert differs[UNIT_COLUMNS:].any() and not differs[:UNIT_COLUMNS].any()


@pytest.mark.parametrize("first", FORMATS, ids=str)
def test_joined_rows_keep_their_numbers(first: PackedFormat) -> None:
    for second in FORMATS:
        parts = [random_packed(each, rows=rows, columns=256, seed=rows) for each, rows in ((first, 3), (second, 2))]
        whole = concatenate(parts)
        assert whole.format == common_format([first, second]) and whole.shape == (5, 256)
        expected = np.concatenate([part.dequantized("float32") for part in parts])
        assert np.array_equal(whole.dequantized("float32").view(np.uint32), expected.view(np.uint32)), second
        assert whole.format == first or first != second


@pytest.mark.parametrize(
    ("number", "reason"),
    [(np.inf, "not finite"), (np.nan, "not finite"), (2.0**-110, "neither"), (-(2.0**101), "neither")],
)
def test_scales_and_offsets_that_no_kernel_computes_are_refused(number: float, reason: str) -> None:
    packed_format = PackedFormat(bits=8, group=32, scales="float32", has_offsets=True)
    matrix = random_packed(packed_format, rows=2, columns=64, seed=0)
    matrix.check()
    replace(matrix, scales=GroupNumbers(values=np.zeros((2, 2), np.float32))).check()
    wrong = matrix.scales.values.copy()
    wrong[1, 0] = number
    for name in ("scales", "offsets"):
        with pytest.raises(ValueError, match=f"a {name[:-1]} that is {reason}"):
            replace(matrix, **{name: GroupNumbers(values=wrong)}).check()


def test_scales_that_could_round_twice_beside_an_offset_are_refused() -> None:
    packed_format = PackedFormat(bits=8, group=32, scales="float32", has_offsets=True)
    matrix = random_packed(packed_format, rows=1, columns=32, seed=0)
    fine = GroupNumbers(values=np.full((1, 1), 1.1, np.float32))
    with pytest.raises(ValueError, match="more than 19 significant bits"):
        replace(matrix, scales=fine).check()
    replace(matrix, scales=fine, offsets=GroupNumbers(values=np.full((1, 1), -0.0, np.float32))).check()


def test_chosen_rows_keep_their_numbers() -> None:
    matrix = random_packed(FORMATS[0], rows=7, columns=128, seed=5)
    order = np.array([6, 0, 3])
    assert np.array_equal(matrix.take(order).dequantized("float32"), matrix.dequantized("float32")[order])


def test_products_of_zero_keep_their_sign() -> None:
    """As a format's own code has it that multiplies only."""
    packed_format = PackedFormat(bits=4, group=32, scales="float16", has_offsets=False, table=SIGNED_CODES)
    matrix = random_packed(packed_format, rows=1, columns=32, seed=0)
    negative = replace(matrix.scales, values=np.full((1, 1), -0.5, np.float16))
    zeros = replace(matrix, codes=np.full((1, 16), 0x88, np.uint8), scales=negative).dequantized("float32")
    assert np.signbit(zeros).all() and not zeros.any()
    assert np.signbit(
        as_float32(replace(matrix, codes=np.full((1, 16), 0x88, np.uint8), scales=negative).dequantized("bfloat16"))
    ).all()


def test_bytes_count_codes_scales_and_units() -> None:
    for each in FORMATS:
        matrix = random_packed(each, rows=5, columns=512, seed=0)
        arrays = [
            matrix.codes,
            *[
                array
                for numbers in (matrix.scales, matrix.offsets)
                if numbers
                for array in (numbers.values, numbers.units)
                if array is not None
            ],
        ]
        assert each.n_bytes(5, 512) == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 5},
        {"group": 48},
        {"table": ()},
        {"table": (*range(15), 128)},
        {"bits": 8},
        {"scales": "float32", "has_offsets": False},
        {"scales": "float16", "has_offsets": True},
    ],
    ids=str,
)
def test_formats_without_executors_are_refused(wrong: dict[str, object]) -> None:
    fields = {"bits": 4, "group": 32, "scales": "float16", "has_offsets": False, "table": UNSIGNED_CODES}
    assert PackedFormat(**fields) and GROUPS  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="are not a valid packed format"):
        PackedFormat(**{**fields, **wrong})  # type: ignore[arg-type]
