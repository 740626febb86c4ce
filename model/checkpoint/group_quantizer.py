"""Rounds matrices to integers of 4 or 8 bits with a scale for each group of columns, for compressed-tensors files.

Scales have 8 significant bits and lie in float16's range, so float16 and bfloat16 hold the same scale: programs that
load it in the model's own number format compute with the numbers that were chosen here. Integers are rounded with that
scale, so its few bits cost nothing.

Shape legend: R rows, C columns, G groups of a row, W words of 32 bits of a row.
"""

from __future__ import annotations

import numpy as np

from model.number_formats import Array, as_float32, rounded_to_bfloat16
from model.packed_matrix import packed_codes

_LEAST, _MOST = np.float32(2.0**-24), np.float32(255 * 2.0**8)
"""The smallest and the largest float16 above 0 with 8 significant bits."""
_STEPS = {4: (7.0, 7.5, 8.0), 8: (127.0,)}
"""Integers that the largest magnitude of a group may become before it is rounded and clipped, to try each.

Clipping a rare large number may round all others better. With 8 bits the difference is nil.
"""


def quantized_symmetric(wide: Array, bits: int, group: int) -> tuple[Array, Array]:
    """Integers int8 [R, C] and scales float16 [R, G] of a finite float32 [R, C]; the number is integer * scale.

    Each group gets the scale, among a few with largest magnitudes and their least-squares refinements, with the least
    squared error. Raises ValueError, with the reason only, if a number is too large for a float16 scale.
    """
    rows = wide.reshape(-1, group)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    top = 2 ** (bits - 1) - 1
    if largest.size and largest.max() > top * _MOST:
        raise ValueError("holds numbers too large for float16 scales")
    best_codes, best_scales, least = _try(rows, _rounded(largest / np.float32(_STEPS[bits][0])), top)
    for step in _STEPS[bits][1:]:
        codes, scales, errors = _try(rows, _rounded(largest / np.float32(step)), top)
        is_better = errors < least
        np.copyto(best_codes, codes, where=is_better)
        np.copyto(best_scales, scales, where=is_better)
        least = np.minimum(least, errors)
    return best_codes.reshape(wide.shape), best_scales.reshape(len(wide), -1).astype(np.float16)


def _try(rows: Array, scales: Array, top: int) -> tuple[Array, Array, Array]:
    """Integers with the better of two scales: the given one [N, 1], and the least-squares one of its integers."""
    codes, errors = _round(rows, scales, top)
    wide = codes.astype(np.float32)
    squares = (wide * wide).sum(axis=1, keepdims=True)
    products = (rows * wide).sum(axis=1, keepdims=True)
    refined = _rounded(np.divide(products, squares, out=scales.copy(), where=squares > 0))
    other_codes, other_errors = _round(rows, refined, top)
    is_better = other_errors < errors
    np.copyto(codes, other_codes, where=is_better)
    return codes, np.where(is_better, refined, scales), np.minimum(errors, other_errors)


def _round(rows: Array, scales: Array, top: int) -> tuple[Array, Array]:
    """Nearest integers int8 [N, group] from -top - 1 to top, and the squared errors [N, 1]."""
    codes = np.rint(rows / scales)
    np.clip(codes, -top - 1, top, out=codes)
    differences = rows - codes * scales
    return codes.astype(np.int8), (differences * differences).sum(axis=1, keepdims=True)


def _rounded(scales: Array) -> Array:
    """The nearest numbers that both bfloat16 and float16 hold, above 0."""
    short = as_float32(rounded_to_bfloat16(np.clip(scales, _LEAST, _MOST)))
    both: Array = np.maximum(short.astype(np.float16).astype(np.float32), _LEAST)
    return both


def packed_words(codes: Array, bits: int) -> Array:
    """int8 [R, C] -> int32 [R, W] of compressed-tensors' pack-quantized: unsigned codes from the low bits on."""
    if bits == 8:
        return np.ascontiguousarray(codes.view(np.uint8) ^ 0x80).view("<i4")
    unsigned = (codes + np.int8(8)).view(np.uint8)
    return np.ascontiguousarray(packed_codes(unsigned)).view("<i4")
