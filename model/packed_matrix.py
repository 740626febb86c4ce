"""Packed matrices: integers of 4 or 8 bits, with a scale and an offset for each group of columns of a row.

A number of the matrix is scale * integer + offset, rounded once to float32. Steps in float32 compute with these
numbers, steps in bfloat16 with these numbers rounded to bfloat16. So a packed matrix stands for one float32 matrix that
is stored smaller, and every backend computes what it would compute with that matrix. AWQ, GPTQ, compressed-tensors,
MXFP4 and the formats of GGUF are such matrices, bit for bit; docs/numbers.md says how.

Shape legend: R rows, C columns, G groups of a row, U units of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from model.number_formats import Array, rounded_to_bfloat16

GROUPS = (16, 32, 64, 128)
"""Columns that may share a scale."""
UNIT_COLUMNS = 256
"""Columns of a row that share a unit; the last unit of a row may have fewer."""
UNSIGNED_CODES = tuple(range(16))
SIGNED_CODES = tuple(range(-8, 8))
"""Integers of the 16 codes of 4 bits, in most formats."""
FP4_CODES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of e2m1, for half of their scale; -0 becomes 0."""
ScaleKind = Literal["float16", "float32", "multiples"]
"""How scales and offsets are stored: as numbers, or as bytes that multiply a float16 unit of UNIT_COLUMNS columns."""
_LEAST, _MOST = 2.0**-100, 2.0**100
"""Magnitude of scales and offsets other than 0: no number is subnormal, which some CPUs round to 0, or infinite."""
_UNUSED_BITS = np.uint32(31)
"""Of scales in float32 that have offsets: a product of 27 bits is exact in float64 beside an offset, if it counts."""
_PIECE = 1 << 18
"""Numbers that are computed at once, so that copies stay in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFormat:
    """How a packed matrix is stored. Raises ValueError if no executor computes with it."""

    bits: int
    """Of a code: 4, or 8, which are int8 integers themselves."""
    group: int
    """Columns that share a scale and an offset: one of GROUPS."""
    scales: ScaleKind
    has_offsets: bool
    """float16 has none; float32 always has them."""
    table: tuple[int, ...] = ()
    """The integers of codes 0 to 15, from -128 to 127; empty with 8 bits."""

    def __post_init__(self) -> None:
        has_table = len(self.table) == 16 and all(-128 <= integer <= 127 for integer in self.table)
        if self.bits not in (4, 8) or self.group not in GROUPS or has_table != (self.bits == 4):
            raise ValueError(
                f"{self.bits} bits in groups of {self.group}, {len(self.table)} integers are not a valid packed format"
            )
        if self.scales != "multiples" and self.has_offsets != (self.scales == "float32"):
            raise ValueError(f"{self.scales} scales with offsets {self.has_offsets} are not a valid packed format")

    def describe(self) -> str:
        """Bits of a code, and how many of them share a scale."""
        return f"{self.bits} bits in groups of {self.group}"

    def n_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix: codes, scales and offsets."""
        groups, numbers = columns // self.group, 1 + self.has_offsets
        of_group = {"float16": 2, "float32": 4, "multiples": 1}[self.scales] * numbers
        units = -(-columns // UNIT_COLUMNS) * 2 * numbers if self.scales == "multiples" else 0
        return rows * (columns * self.bits // 8 + groups * of_group + units)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNumbers:
    """A number for each group of each row."""

    values: Array
    """float16 or float32 [R, G]; or int8 or uint8, which multiply `units`."""
    units: Array | None = None
    """float16 [R, U]."""

    def numbers(self, group: int) -> Array:
        """float32 [R, G]; products of a byte and a float16 unit are exact."""
        values = self.values.astype(np.float32)
        if self.units is None:
            return values
        units = np.repeat(self.units.astype(np.float32), UNIT_COLUMNS // group, axis=1)
        product: Array = values * units[:, : values.shape[1]]
        return product

    def take(self, rows: slice | Array) -> GroupNumbers:
        """These rows."""
        return GroupNumbers(values=self.values[rows], units=None if self.units is None else self.units[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A packed matrix of C columns, which are a multiple of its group."""

    format: PackedFormat
    codes: Array
    """int8 [R, C]; or uint8 [R, C / 2] with two codes of 4 bits in a byte, the first one in its low bits."""
    scales: GroupNumbers
    offsets: GroupNumbers | None = None
    """None: each is -0, which changes no product."""

    @property
    def shape(self) -> tuple[int, int]:
        """R, C."""
        rows, width = self.codes.shape
        return rows, width * 8 // self.format.bits

    def check(self) -> None:
        """Raises ValueError, with the reason only, if a scale or an offset cannot be computed with."""
        for what, of in (("scale", self.scales), ("offset", self.offsets)):
            if of is None:
                continue
            sizes = np.abs(of.numbers(self.format.group))
            if not np.isfinite(sizes).all():
                raise ValueError(f"holds a {what} that is not finite")
            if (sizes > _MOST).any() or ((sizes < _LEAST) & (sizes > 0)).any():
                raise ValueError(f"holds a {what} that is neither 0 nor from 2^-100 to 2^100")
        has_offsets = self.format.scales == "float32" and self.offsets is not None and self.offsets.values.any()
        if has_offsets and (self.scales.values.view(np.uint32) & _UNUSED_BITS).any():
            raise ValueError("holds a scale of more than 19 significant bits beside an offset")

    def integers(self) -> Array:
        """int8 [R, C]."""
        if self.format.bits == 8:
            return self.codes
        table = np.array(self.format.table, np.int8)
        pairs = np.array([(table[byte & 15], table[byte >> 4]) for byte in range(256)], np.int8).view(np.int16)[:, 0]
        integers: Array = pairs[self.codes].view(np.int8)
        return integers

    def take(self, rows: slice | Array) -> PackedMatrix:
        """The matrix of these rows."""
        offsets = None if self.offsets is None else self.offsets.take(rows)
        return replace(self, codes=self.codes[rows], scales=self.scales.take(rows), offsets=offsets)

    def dequantized(self, dtype: str) -> Array:
        """The numbers [R, C] in float32, or in bfloat16 as uint16."""
        rows, columns = self.shape
        numbers = np.empty((rows, columns), np.float32 if dtype == "float32" else np.uint16)
        step = max(1, _PIECE // columns)
        for first in range(0, rows, step):
            part = self.take(slice(first, first + step))._wide()
            numbers[first : first + step] = part if dtype == "float32" else rounded_to_bfloat16(part)
        return numbers

    def _wide(self) -> Array:
        group, integers = self.format.group, self.integers()
        # Without an offset the product is rounded, if at all; with one it needs more bits, so that only the sum is.
        exact: type[np.floating[Any]] = np.float32 if self.offsets is None else np.float64
        shape = (len(integers), -1, group)
        wide: Array = integers.reshape(shape).astype(exact) * self.scales.numbers(group).astype(exact)[:, :, None]
        if self.offsets is not None:
            wide += self.offsets.numbers(group).astype(exact)[:, :, None]
        narrow: Array = wide.reshape(integers.shape).astype(np.float32, copy=False)
        return narrow

    def in_format(self, target: PackedFormat) -> PackedMatrix:
        """The same numbers in a common_format() of this one and others."""
        own = self.format
        if own == target:
            return self
        codes = self.codes if own.bits == target.bits and own.table == target.table else self.integers()
        repeats = own.group // target.group

        def numbers(source: GroupNumbers | None) -> GroupNumbers:
            if source is None:
                return GroupNumbers(values=np.full((len(codes), self.shape[1] // target.group), -0.0, np.float32))
            return GroupNumbers(values=np.repeat(source.numbers(own.group), repeats, axis=1))

        if (own.scales, own.has_offsets, own.group) == (target.scales, target.has_offsets, target.group):
            return replace(self, format=target, codes=codes)
        if target.scales != "float32":
            scales = GroupNumbers(values=np.repeat(self.scales.values, repeats, axis=1))
            return PackedMatrix(format=target, codes=codes, scales=scales)
        return PackedMatrix(format=target, codes=codes, scales=numbers(self.scales), offsets=numbers(self.offsets))


def common_format(formats: Sequence[PackedFormat]) -> PackedFormat:
    """The smallest format that holds the numbers of matrices in these formats, exactly."""
    first, *others = formats
    if all(other == first for other in others):
        return first
    group = min(each.group for each in formats)
    tables = {each.table for each in formats}
    table = tables.pop() if len(tables) == 1 else ()
    kinds = {(each.scales, each.has_offsets) for each in formats}
    is_one_kind = len(kinds) == 1 and (first.scales != "multiples" or all(each.group == group for each in formats))
    scales, has_offsets = kinds.pop() if is_one_kind else ("float32", True)
    return PackedFormat(bits=4 if table else 8, group=group, scales=scales, has_offsets=has_offsets, table=table)


def concatenate(parts: Sequence[PackedMatrix]) -> PackedMatrix:
    """The rows of all parts, in their common_format()."""
    if len(parts) == 1:
        return parts[0]
    target = common_format([part.format for part in parts])
    same = [part.in_format(target) for part in parts]

    def joined(of: Callable[[PackedMatrix], GroupNumbers]) -> GroupNumbers:
        units = [of(part).units for part in same]
        values = np.concatenate([of(part).values for part in same])
        return GroupNumbers(values=values, units=None if units[0] is None else np.concatenate(units))  # type: ignore[arg-type]

    def offsets_of(part: PackedMatrix) -> GroupNumbers:
        assert part.offsets is not None
        return part.offsets

    return PackedMatrix(
        format=target,
        codes=np.concatenate([part.codes for part in same]),
        scales=joined(lambda part: part.scales),
        offsets=joined(offsets_of) if target.has_offsets else None,
    )


def packed_codes(codes: Array) -> Array:
    """Codes of 4 bits as uint8 [R, C] -> uint8 [R, C / 2]."""
    packed: Array = codes[:, ::2] | codes[:, 1::2] << 4
    return packed
