"""Numbers of a stored tensor as numpy arrays, bfloat16 as uint16; fp8 becomes bfloat16."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np

from model.checkpoint.tensor_index import StoredTensor
from model.files import CheckpointError, regular_file
from model.number_formats import Array, all_finite, as_float32, rounded_to_bfloat16

STORED_TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""Number formats of safetensors that need no scales."""
NUMBER_FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names of their numbers."""
_FP8 = "F8_E4M3"
ALLOWED_TYPES = f"{', '.join(STORED_TYPES)}, and {_FP8} with scales"
_READ = STORED_TYPES | {
    _FP8: np.dtype(np.uint8),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")
"""Of transformers and vLLM's compressed-tensors, next to `weight`. Both multiply."""
_OF_ACTIVATIONS = tuple(f"{each}_scale" for each in ("activation", "input", "output", "k", "v"))
"""Scales of activations, which stay in the engine's number format."""
_BLOCK = 128


def mapped(stored: StoredTensor) -> Array:
    """The tensor of the file, which is mapped while the array exists; fp8 as its bytes. Raises CheckpointError."""
    path, real = stored.path, regular_file(stored.path)
    try:
        with real.open("rb") as file:
            region = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        numbers = np.frombuffer(region, _READ[stored.dtype], _extent(stored), stored.start)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError:  # the file is shorter now
        raise CheckpointError(f"{path}: was replaced while it was read") from None
    if region[: len(stored.header)] != stored.header:
        raise CheckpointError(f"{path}: was replaced while it was read")
    if stored.strides is not None:
        return np.lib.stride_tricks.as_strided(
            numbers, stored.shape, [stride * numbers.itemsize for stride in stored.strides], writeable=False
        )
    array: Array = numbers.reshape(stored.shape)
    return array + np.float32(stored.plus) if stored.plus else array


def _extent(stored: StoredTensor) -> int:
    """Numbers from its first one to its last one in the file."""
    if stored.strides is None or 0 in stored.shape:
        return math.prod(stored.shape)
    return 1 + sum((size - 1) * stride for size, stride in zip(stored.shape, stored.strides, strict=True))


def match_scales(
    found: Mapping[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The tensors without scales, and the scales of each tensor in fp8, by the name of the tensor.

    Raises CheckpointError if scales are missing or do not fit.
    """
    scales: dict[str, StoredTensor] = {}
    consumed: set[str] = set()
    for name, stored in found.items():
        if not stored.dtype.startswith("F8_"):
            continue
        if stored.dtype != _FP8:
            raise CheckpointError(f"{stored.path}: {name} has dtype {stored.dtype}; allowed are {ALLOWED_TYPES}")
        module = name.removesuffix("weight")
        if module == name:
            raise CheckpointError(f"{stored.path}: {name} is in fp8, which only tensors called weight may be")
        scale = next((found[module + each] for each in _SCALE_NAMES if module + each in found), None)
        if scale is None:
            raise CheckpointError(f"{stored.path}: {name} is in fp8 and has no {module}{_SCALE_NAMES[0]}")
        _check_scale(stored, scale)
        scales[name] = scale
        consumed |= {module + each for each in _OF_ACTIVATIONS if module + each in found}
        consumed.add(scale.name)
    return {name: stored for name, stored in found.items() if name not in consumed}, scales


def _check_scale(stored: StoredTensor, scale: StoredTensor) -> None:
    rows, *columns = stored.shape
    blocks = _blocks(stored)
    if len(columns) != 1 or scale.shape not in ((), (1,), (1, 1), (rows,), (rows, 1), blocks):
        raise CheckpointError(
            f"{scale.path}: {scale.name} has shape {list(scale.shape)}: it must be one number, one for each of {rows} "
            f"rows, or one for each block of {_BLOCK} x {_BLOCK} numbers, {list(blocks)}"
        )
    if scale.dtype not in STORED_TYPES:
        raise CheckpointError(
            f"{scale.path}: {scale.name} has dtype {scale.dtype}; allowed are {', '.join(STORED_TYPES)}"
        )


def _blocks(stored: StoredTensor) -> tuple[int, ...]:
    return tuple(-(-size // _BLOCK) for size in stored.shape)


def _has_blocks(stored: StoredTensor, scale: StoredTensor) -> bool:
    return scale.shape == _blocks(stored) and scale.shape not in ((1, 1), (stored.shape[0], 1))


def dequantized(stored: StoredTensor, scale: StoredTensor) -> Array:
    """A matrix in fp8 times its scales, rounded to bfloat16. Raises CheckpointError."""
    codes, factors = mapped(stored), mapped(scale)
    factors = as_float32(factors) if factors.dtype == np.uint16 else factors.astype(np.float32)
    rows, columns = codes.shape
    if has_blocks := _has_blocks(stored, scale):
        factors = np.repeat(factors, _BLOCK, axis=1)[:, :columns]
    rounded = np.empty(codes.shape, np.uint16)
    for start in range(0, rows, _BLOCK):  # float32 numbers of a few rows exist at a time
        part = _E4M3[codes[start : start + _BLOCK]]
        if has_blocks:
            part *= factors[start // _BLOCK]
        else:
            part *= factors if factors.size == 1 else factors.reshape(rows, 1)[start : start + _BLOCK]
        if not all_finite(part):
            raise CheckpointError(f"{stored.path}: {stored.name} holds numbers that are not finite")
        rounded[start : start + _BLOCK] = rounded_to_bfloat16(part)
    return rounded


def _e4m3_values() -> Array:
    """The number of each byte: 4 bits of exponent with a bias of 7, 3 bits of mantissa; no infinity, 0x7F is NaN."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents > 0, (8 + mantissas) * 2.0 ** (exponents - 10), mantissas * 2.0**-9)
    sizes[codes & 127 == 127] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


_E4M3 = _e4m3_values()
