"""Numbers of packed matrices in Triton, for the kernels that multiply with them. model/packed_matrix.py defines them.

A GPU keeps a packed matrix as it is stored: the same codes, scales, offsets and units, and so the same bits per weight.
A tile reads 64 bytes of 4-bit codes for each row; its scales, one for 16 to 128 columns, are read once per group:

    codes [N, K / 2] bytes -> low and high halves, joined to [N, K] -> integers, by the table
    scales, offsets [N, K / S]: numbers, or bytes times the unit [N] of 256 columns
    number = fma(scale, integer, offset), rounded to the number format of x

Integers of an even table, such as 0 to 15, are computed from the code; those of another one are cut from two words of
64 bits, which hold its 16 bytes. Without offsets a number is a product, rounded once, as an fma with -0 would be.

Shape legend: N rows and K columns of a tile, S columns of a group.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from model.nn.packed_tensors import PackedTensors
from model.packed_matrix import UNIT_COLUMNS, PackedFormat

_UNIT_COLUMNS = tl.constexpr(UNIT_COLUMNS)
Pointers = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def packed_pointers(weight: PackedTensors) -> Pointers:
    """Pointers to codes, scales, units of scales, offsets and units of offsets.

    A missing array is replaced by one that kernels do not read.
    """
    scales, offsets = weight.scales, weight.offsets or weight.scales
    return (
        weight.codes,
        scales.values,
        scales.values if scales.units is None else scales.units,
        offsets.values,
        offsets.values if offsets.units is None else offsets.units,
    )


def packed_constants(packed_format: PackedFormat) -> dict[str, Any]:
    """What a kernel is compiled for."""
    table = packed_format.table
    steps = {after - before for before, after in pairwise(table)}
    is_even = len(steps) == 1
    words = [int.from_bytes(bytes(entry & 255 for entry in table[half : half + 8]), "little") for half in (0, 8)]
    low, high = (0, 0) if is_even or not table else (word - (word >> 63 << 64) for word in words)
    return {
        "BITS": packed_format.bits,
        "GROUP": packed_format.group,
        "HAS_UNITS": packed_format.scales == "multiples",
        "HAS_OFFSETS": packed_format.has_offsets,
        "STEP": steps.pop() if is_even else 0,
        "FIRST": table[0] if table else 0,
        "LOW": low,
        "HIGH": high,
    }


UNPACKED = {"BITS": 0, "GROUP": 0, "HAS_UNITS": False, "HAS_OFFSETS": False, "STEP": 0, "FIRST": 0, "LOW": 0, "HIGH": 0}
"""In place of packed_constants() for a matrix that is not packed."""


@triton.jit
def unpacked(
    bytes_NB, BITS: tl.constexpr, STEP: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr
):
    """float32 [N, K]: integers of codes; a byte holds one or two of them."""
    if BITS == 8:
        integers_NK = bytes_NB.to(tl.float32)
    else:
        codes_NBH = tl.join(bytes_NB & 15, bytes_NB >> 4)
        codes_NK = tl.reshape(codes_NBH, (bytes_NB.shape[0], 2 * bytes_NB.shape[1]))
        if STEP != 0:
            integers_NK = (codes_NK.to(tl.int16) * STEP + FIRST).to(tl.float32)
        else:
            low = tl.full((1, 1), LOW, tl.int64)
            high = tl.full((1, 1), HIGH, tl.int64)
            words_NK = tl.where(codes_NK < 8, low, high) >> ((codes_NK & 7) * 8).to(tl.int64)
            integers_NK = words_NK.to(tl.int8).to(tl.float32)
    return integers_NK


@triton.jit
def group_numbers(
    values_ptr, units_ptr, row_N, is_row_N, start,
    N_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, HAS_UNITS: tl.constexpr,
):  # fmt: skip
    """float32 [N, K / S]: scales or offsets of the groups from column `start` on; one unit holds for them."""
    GROUPS: tl.constexpr = N_COLUMNS // GROUP
    group_G = start // GROUP + tl.arange(0, BLOCK_K // GROUP)
    is_number_NG = is_row_N[:, None] & (group_G < GROUPS)[None, :]
    numbers_NG = tl.load(values_ptr + row_N[:, None] * GROUPS + group_G[None, :], mask=is_number_NG, other=0)
    numbers_NG = numbers_NG.to(tl.float32)
    if HAS_UNITS:
        UNITS: tl.constexpr = (N_COLUMNS + _UNIT_COLUMNS - 1) // _UNIT_COLUMNS
        unit_N = tl.load(units_ptr + row_N * UNITS + start // _UNIT_COLUMNS, mask=is_row_N, other=0.0)
        numbers_NG *= unit_N.to(tl.float32)[:, None]
    return numbers_NG


@triton.jit
def packed_tile(
    codes_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, row_N, is_row_N, start,
    N_COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    HAS_UNITS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """float32 [N, K]: numbers of some rows, from column `start` on, a multiple of K; those beyond are 0 or an offset.

    row_N: int64. BLOCK_K: a divisor of 256, and a multiple of a group.
    """
    BYTES: tl.constexpr = BLOCK_K * BITS // 8
    ROW_BYTES: tl.constexpr = N_COLUMNS * BITS // 8
    byte_B = start * BITS // 8 + tl.arange(0, BYTES)
    is_byte_NB = is_row_N[:, None] & (byte_B < ROW_BYTES)[None, :]
    bytes_NB = tl.load(codes_ptr + row_N[:, None] * ROW_BYTES + byte_B[None, :], mask=is_byte_NB, other=0)
    integers_NK = unpacked(bytes_NB, BITS, STEP, FIRST, LOW, HIGH)
    scales_NG = group_numbers(scales_ptr, scale_units_ptr, row_N, is_row_N, start, N_COLUMNS, BLOCK_K, GROUP, HAS_UNITS)
    by_group_NGS = tl.reshape(integers_NK, (bytes_NB.shape[0], BLOCK_K // GROUP, GROUP))
    if HAS_OFFSETS:
        offsets_NG = group_numbers(
            offsets_ptr, offset_units_ptr, row_N, is_row_N, start, N_COLUMNS, BLOCK_K, GROUP, HAS_UNITS
        )
        shape: tl.constexpr = by_group_NGS.shape
        scales_NGS, offsets_NGS = (
            tl.broadcast_to(scales_NG[:, :, None], shape),
            tl.broadcast_to(offsets_NG[:, :, None], shape),
        )
        numbers_NGS = tl.fma(scales_NGS, by_group_NGS, offsets_NGS)
    else:
        numbers_NGS = by_group_NGS * scales_NG[:, :, None]
    return tl.reshape(numbers_NGS, (bytes_NB.shape[0], BLOCK_K))
