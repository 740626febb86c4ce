"""ctypes binding of the compiled kernels: structures, functions, buffers, and memory in huge pages.

Every structure mirrors one of source/interface.h; ink_sizes() verifies that their sizes agree.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from ctypes import CDLL, POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_long, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from model.number_formats import Array

# With pages of 2 MiB instead of 4 KiB, reading 256 MB of weights ran at 53 instead of 41 GB/s (2026-11-21).

_HUGE_PAGE = 2 << 20
_REGION = 32 << 20
_CACHE_LINE = 64


class HugepageAllocator:
    """Bump allocator of zeroed memory, which is released only with the allocator."""

    def __init__(self, n_bytes: int = 0) -> None:
        """n_bytes: size of a first mapping, in which the buffers follow each other."""
        self.buffers: list[tuple[int, int]] = []
        """Address and bytes of each buffer, in whole cache lines."""
        self._regions: list[mmap.mmap] = []
        self._end = 0
        self.start = self._next = self._grow(n_bytes) if n_bytes else 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(n_bytes for _, n_bytes in self.buffers)

    def allocate(self, n_bytes: int) -> int:
        """Returns the address of `n_bytes` new bytes, aligned to a cache line."""
        start, n_bytes = self._next, -(-n_bytes // _CACHE_LINE) * _CACHE_LINE
        if start + n_bytes > self._end:
            start = self._grow(n_bytes)
        self._next = start + n_bytes
        self.buffers.append((start, n_bytes))
        return start

    def _grow(self, n_bytes: int) -> int:
        region = _map(max(n_bytes, _REGION))
        self._regions.append(region)
        start = _address(region)
        self._end = start + len(region)
        return -(-start // _HUGE_PAGE) * _HUGE_PAGE


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Returns an array of zeros in huge pages; the system allocates memory only for pages that are written."""
    count = math.prod(shape)
    region = _map(count * dtype.itemsize)
    offset = -_address(region) % _HUGE_PAGE
    return np.frombuffer(region, dtype, count, offset).reshape(shape)


def address_of(array: Array) -> int:
    """Where the first number is."""
    address: int = array.__array_interface__["data"][0]
    return address


def _map(n_bytes: int) -> mmap.mmap:
    """Maps memory with enough extra bytes to align it to a huge page."""
    # Shared memory, Python's default, gets huge pages only if an administrator enabled them (shmem_enabled).
    region = mmap.mmap(-1, n_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice := getattr(mmap, "MADV_HUGEPAGE", None):
        region.madvise(advice)
    return region


def _address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


class Matrix(Structure):
    """Mirrors InkMatrix."""

    _fields_ = (
        *((name, c_void_p) for name in ("packed", "bias", "scale")),
        *((name, c_int32) for name in ("outputs", "steps", "format", "unused")),
    )


class NativeOperation(Structure):
    """Mirrors InkOperation."""

    _fields_ = (
        *((name, c_int32) for name in ("kind", "source", "target", "flag", "layer", "columns")),
        *((name, c_int32) for name in ("gated", "window", "rotary_half")),
        *((name, c_float) for name in ("eps", "attention_scale")),
        *((name, c_int32) for name in ("accumulates", "group", "unused")),
        ("matrix", POINTER(Matrix)),
        *((name, c_void_p) for name in ("weight", "bias", "rope_table")),
    )


class Cache(Structure):
    """Mirrors InkCache."""

    _fields_ = (("numbers", c_void_p), ("n_blocks", c_int64))


class Shape(Structure):
    """Mirrors InkShape."""

    _fields_ = (
        *((name, c_int32) for name in ("is_bf16", "n_registers", "query_heads", "kv_heads", "head_width", "width")),
        *((name, c_int32) for name in ("n_operations", "n_groups", "final_norm", "padded_head")),
        *((name, c_float) for name in ("embedding_scale", "soft_cap", "eps")),
        ("position_embeddings", c_void_p),
        *((name, POINTER(Matrix)) for name in ("embedding", "head")),
        *((name, c_void_p) for name in ("final_weight", "final_bias", "caches", "register_columns", "operations")),
    )


class Step(Structure):
    """Mirrors InkStep."""

    _fields_ = (
        *((name, c_int32) for name in ("n_rows", "n_chunks")),
        *((name, c_void_p) for name in ("tokens", "chunks", "seconds", "finite")),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ink_sizes": (c_int, ()),
    "ink_open_pool": (c_void_p, (c_int, c_int)),
    "ink_close_pool": (None, (c_void_p,)),
    "ink_format": (c_int, (c_char_p, c_int)),
    "ink_packed_bytes": (c_long, (c_int, c_int, c_int, c_int)),
    "ink_pack": (None, (c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_int, c_int, c_void_p)),
    "ink_quantize": (None, (c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_void_p, c_void_p)),
    "ink_open": (c_void_p, (POINTER(Shape), c_void_p)),
    "ink_close": (None, (c_void_p,)),
    "ink_run": (None, (c_void_p, POINTER(Step))),
    "ink_head": (None, (c_void_p, c_void_p, c_int, c_void_p, c_long)),
}
"""Result and arguments of each function; app/engine/cpu/sampler.py has the sampler's."""


class LibraryError(ValueError):
    """The file is not a library with the expected interface."""


def load_library(path: Path) -> CDLL:
    """Loads compiled kernels and checks their interface. Raises LibraryError."""
    try:
        library = CDLL(str(path))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path}: cannot be loaded ({error})") from None
    expected_sizes = sum(ctypes.sizeof(each) * 1000**i for i, each in enumerate((Matrix, NativeOperation, Shape)))
    if library.ink_sizes() != expected_sizes:
        raise LibraryError(f"{path}: has a different interface, because it was built from other sources")
    return library
