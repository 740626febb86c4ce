"""Quantized tensors of GGUF files as packed matrices, bit for bit: their blocks are only sorted into arrays.

Formats of the blocks: ggml/src/ggml-common.h and ggml-quants.c of https://github.com/ggml-org/llama.cpp. A block of the
K formats has 256 columns, whose groups have small multiples of a unit as scales; others have 32 columns and one scale.

Shape legend: R rows, N blocks of a row, G groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from model.number_formats import Array
from model.packed_matrix import (
    FP4_CODES,
    SIGNED_CODES,
    UNSIGNED_CODES,
    GroupNumbers,
    PackedFormat,
    PackedMatrix,
    packed_codes,
)

_PIECE_BYTES = 1 << 18
"""Bytes of blocks that are sorted at once, so that copies stay in a core's cache."""
_IQ4_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What the arrays of a packed matrix have for some blocks; the last axis is one block."""

    codes: Array
    scales: Array
    units: Array | None = None
    offsets: Array | None = None
    offset_units: Array | None = None


@dataclass(frozen=True, slots=True)
class _Blocks:
    format: PackedFormat
    sort: Callable[[Array], _Parts]
    """Blocks as uint8 [R, N, bytes] -> parts."""


def _float16(blocks: Array, at: int) -> Array:
    """float16 [R, N, 1]"""
    numbers: Array = np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")
    return numbers


def _nibbles(blocks: Array, half: int) -> Array:
    """The low bits of `half` bytes, then their high bits, and so on: uint8 [R, N, 2 * bytes]."""
    chunks = blocks.reshape(*blocks.shape[:2], -1, 1, half)
    codes: Array = np.concatenate([chunks & 15, chunks >> 4], axis=-2).reshape(*blocks.shape[:2], -1)
    return codes


def _q4_0(blocks: Array) -> _Parts:
    return _Parts(_nibbles(blocks[..., 2:], 16), _float16(blocks, 0))


def _q4_1(blocks: Array) -> _Parts:
    scales, offsets = (_float16(blocks, at).astype(np.float32) for at in (0, 2))
    return _Parts(_nibbles(blocks[..., 4:], 16), scales, offsets=offsets)


def _fifth_bits(blocks: Array, at: int) -> Array:
    """16 or 0 for each of 32 columns."""
    bits: Array = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little") << 4
    return bits


def _q5_0(blocks: Array) -> _Parts:
    codes = (_nibbles(blocks[..., 6:], 16) | _fifth_bits(blocks, 2)).view(np.int8) - np.int8(16)
    return _Parts(codes, _float16(blocks, 0))


def _q5_1(blocks: Array) -> _Parts:
    codes = (_nibbles(blocks[..., 8:], 16) | _fifth_bits(blocks, 4)).view(np.int8)
    scales, offsets = (_float16(blocks, at).astype(np.float32) for at in (0, 2))
    return _Parts(codes, scales, offsets=offsets)


def _q8_0(blocks: Array) -> _Parts:
    return _Parts(blocks[..., 2:].view(np.int8), _float16(blocks, 0))


def _six_bits(blocks: Array) -> tuple[Array, Array]:
    """Scales and minima of 8 groups, uint8 [R, N, 8], which bytes 4 to 15 of Q4_K and Q5_K hold with 6 bits each."""
    first, second, third = (blocks[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return scales, minima


def _q4_k(blocks: Array) -> _Parts:
    scales, minima = _six_bits(blocks)
    return _Parts(_nibbles(blocks[..., 16:], 32), scales, _float16(blocks, 0), minima, -_float16(blocks, 2))


def _q5_k(blocks: Array) -> _Parts:
    scales, minima = _six_bits(blocks)
    bits = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _nibbles(blocks[..., 48:], 32) | bits.reshape(*blocks.shape[:2], -1) << 4
    return _Parts(codes.view(np.int8), scales, _float16(blocks, 0), minima, -_float16(blocks, 2))


def _q6_k(blocks: Array) -> _Parts:
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = _nibbles(blocks[..., :128], 64) | high.reshape(*blocks.shape[:2], -1) << 4
    return _Parts(codes.view(np.int8) - np.int8(32), blocks[..., 192:208].view(np.int8), _float16(blocks, 208))


def _iq4_xs(blocks: Array) -> _Parts:
    high = blocks[..., 2:4, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    low = np.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], axis=-1)
    scales = low.reshape(*low.shape[:2], -1) | high.reshape(*high.shape[:2], -1) << 4
    return _Parts(_nibbles(blocks[..., 8:], 16), scales.view(np.int8) - np.int8(32), _float16(blocks, 0))


def _mxfp4(blocks: Array) -> _Parts:
    """Blocks of zeros, which quantizers give any scale, get the scale 0."""
    has_numbers = (blocks[..., 1:] & 0x77).any(axis=-1, keepdims=True)
    scales = np.ldexp(has_numbers.astype(np.float32), blocks[..., :1].astype(np.int32) - 128)
    return _Parts(_nibbles(blocks[..., 1:], 16), scales, offsets=np.full_like(scales, -0.0))


def _format(bits: int, group: int, scales: str, table: tuple[int, ...] = (), *, offsets: bool = False) -> PackedFormat:
    return PackedFormat(bits=bits, group=group, scales=scales, has_offsets=offsets, table=table)  # type: ignore[arg-type]


_BLOCKS = {
    "Q4_0": _Blocks(_format(4, 32, "float16", SIGNED_CODES), _q4_0),
    "Q4_1": _Blocks(_format(4, 32, "float32", UNSIGNED_CODES, offsets=True), _q4_1),
    "Q5_0": _Blocks(_format(8, 32, "float16"), _q5_0),
    "Q5_1": _Blocks(_format(8, 32, "float32", offsets=True), _q5_1),
    "Q8_0": _Blocks(_format(8, 32, "float16"), _q8_0),
    "Q4_K": _Blocks(_format(4, 32, "multiples", UNSIGNED_CODES, offsets=True), _q4_k),
    "Q5_K": _Blocks(_format(8, 32, "multiples", offsets=True), _q5_k),
    "Q6_K": _Blocks(_format(8, 16, "multiples"), _q6_k),
    "IQ4_NL": _Blocks(_format(4, 32, "float16", _IQ4_TABLE), _q4_0),
    "IQ4_XS": _Blocks(_format(4, 32, "multiples", _IQ4_TABLE), _iq4_xs),
    "MXFP4": _Blocks(_format(4, 32, "float32", FP4_CODES, offsets=True), _mxfp4),
}
PACKED_FORMATS = {name: blocks.format for name, blocks in _BLOCKS.items()}
"""Name of a type -> the packed format that holds the same numbers."""


def read_blocks(name: str, blocks: Array) -> PackedMatrix:
    """The packed matrix of blocks of the type `name`, uint8 [R, N, bytes], which may lie in a file.

    Besides the result, copies of a few rows exist at a time. Raises ValueError, with the reason only, for a scale that
    cannot be computed with.
    """
    of = _BLOCKS[name]
    rows, row_bytes = len(blocks), blocks.shape[1] * blocks.shape[2]
    step = max(1, _PIECE_BYTES // row_bytes)
    whole: dict[str, Array] = {}
    for first in range(0, rows, step):
        parts = of.sort(blocks[first : first + step])
        for part in ("codes", "scales", "units", "offsets", "offset_units"):
            if (numbers := getattr(parts, part)) is not None:
                flat = numbers.reshape(len(numbers), -1)
                flat = packed_codes(flat) if part == "codes" and of.format.bits == 4 else flat
                if part not in whole:
                    whole[part] = np.empty((rows, flat.shape[1]), flat.dtype)
                whole[part][first : first + step] = flat
    offsets = None
    if "offsets" in whole:
        offsets = GroupNumbers(values=whole["offsets"], units=whole.get("offset_units"))
    scales = GroupNumbers(values=whole["scales"], units=whole.get("units"))
    matrix = PackedMatrix(format=of.format, codes=whole["codes"], scales=scales, offsets=offsets)
    matrix.check()
    return matrix
