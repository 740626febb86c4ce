"""Number formats of weights as numpy arrays: float32, float16, and bfloat16 as uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by number format."""
_PIECE = 1 << 18
"""Numbers that are rounded at once, so that copies stay in a core's cache."""


def as_float32(array: Array) -> Array:
    """The same numbers in float32; bfloat16 is stored as uint16."""
    if array.dtype != np.uint16:
        return array.astype(np.float32, copy=False)
    wide = array.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def rounded_to_bfloat16(array: Array) -> Array:
    """Rounds finite numbers to the nearest bfloat16, ties to even, as torch does."""
    bits, rounded = array.reshape(-1).view(np.uint32), np.empty(array.size, np.uint16)
    for start in range(0, array.size, _PIECE):
        piece = bits[start : start + _PIECE]
        rounded[start : start + _PIECE] = (piece + 0x7FFF + (piece >> 16 & 1)) >> 16
    return rounded.reshape(array.shape)


def all_finite(array: Array) -> bool:
    """Whether all numbers are finite, without a copy."""
    if array.dtype == np.float32:
        return bool(np.isfinite(array.min()) and np.isfinite(array.max()))
    # Exponents of ones only: the bits of finite numbers are below them, or from 0x8000 to below the negative ones.
    limit = 0x7C00 if array.dtype == np.float16 else 0x7F80
    return bool(array.view(np.int16).max() < limit and array.view(np.uint16).max() < limit + 0x8000)
