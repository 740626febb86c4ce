"""Zeroed memory in huge pages.

With pages of 2 MiB instead of 4 KiB, reading 256 MB of weights ran at 53 instead of 41 GB/s (2026-11-21).
"""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np

from model.number_formats import Array

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


def _map(n_bytes: int) -> mmap.mmap:
    """Maps memory with enough extra bytes to align it to a huge page."""
    # Shared memory, Python's default, gets huge pages only if an administrator enabled them (shmem_enabled).
    region = mmap.mmap(-1, n_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if advice := getattr(mmap, "MADV_HUGEPAGE", None):
        region.madvise(advice)
    return region


def _address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))
