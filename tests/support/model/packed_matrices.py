"""Random packed matrices, of every format that executors compute."""

from __future__ import annotations

import numpy as np

from model.packed_matrix import (
    FP4_CODES,
    GROUPS,
    SIGNED_CODES,
    UNIT_COLUMNS,
    UNSIGNED_CODES,
    GroupNumbers,
    PackedFormat,
    PackedMatrix,
)

_KINDS = (("float16", False), ("float32", True), ("multiples", False), ("multiples", True))
_TABLES = (
    ("float16", False, UNSIGNED_CODES),
    ("float16", False, FP4_CODES),
    ("float16", False, tuple(range(-7, 9))),
    ("float16", False, tuple(range(-40, -24))),
    ("multiples", False, SIGNED_CODES),
    ("multiples", True, SIGNED_CODES),
    ("float32", True, SIGNED_CODES),
)
"""Tables that are read in different ways: consecutive integers or not, from 0 on or not, beside offsets or not."""
FORMATS = [
    PackedFormat(bits=bits, group=group, scales=scales, has_offsets=has_offsets, table=table)  # type: ignore[arg-type]
    for index, (scales, has_offsets) in enumerate(_KINDS)
    for bits, table in ((4, (SIGNED_CODES, UNSIGNED_CODES, FP4_CODES, UNSIGNED_CODES)[index]), (8, ()))
    for group in GROUPS
] + [
    PackedFormat(bits=4, group=32, scales=scales, has_offsets=has_offsets, table=table)  # type: ignore[arg-type]
    for scales, has_offsets, table in _TABLES
]
"""Every number of bits, group and kind of scales with tables in turn, then the other tables."""


def random_packed(packed_format: PackedFormat, *, rows: int, columns: int, seed: int) -> PackedMatrix:
    """A matrix of numbers of about the size of trained weights."""
    random = np.random.default_rng(seed)
    if packed_format.bits == 4:
        codes = random.integers(0, 256, (rows, columns // 2), np.uint8)
    else:
        codes = random.integers(-128, 128, (rows, columns), np.int8)
    largest = 127 if packed_format.bits == 8 else max(map(abs, packed_format.table))

    def numbers(size: float, *, is_signed: bool) -> GroupNumbers:
        shape = (rows, columns // packed_format.group)
        if packed_format.scales != "multiples":
            values = random.uniform(0.2, 1.0, shape) * size * (random.choice([-1, 1], shape) if is_signed else 1)
            numbers = values.astype(packed_format.scales)
            if packed_format.scales == "float32":
                numbers.view(np.uint32)[:] &= ~np.uint32(31)  # as PackedMatrix.check() has it
            return GroupNumbers(values=numbers)
        multiples = random.integers(-128, 128, shape, np.int8) if is_signed else random.integers(1, 64, shape, np.uint8)
        units = random.uniform(0.2, 1.0, (rows, -(-columns // UNIT_COLUMNS))) * size / 64
        return GroupNumbers(values=multiples, units=units.astype(np.float16))

    size = 3 * columns**-0.5
    scales = numbers(size / largest, is_signed=not packed_format.has_offsets)
    offsets = numbers(size, is_signed=True) if packed_format.has_offsets else None
    return PackedMatrix(format=packed_format, codes=codes, scales=scales, offsets=offsets)
