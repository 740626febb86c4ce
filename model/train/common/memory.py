"""How the C library gives freed memory back, and what it is called when there is none. Knows nothing of tensors."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of glibc's malloc.h."""
_NEVER = 2**31 - 1
_TWO_HEAPS = 2**27
_LARGE = 2**30


def keep_freed_memory() -> None:
    """Keeps what is freed for what is asked for next; does nothing where the C library is not glibc.

    It gives tensors of a megabyte back as soon as they are freed, and each new one costs as much for the system to fill
    with zeros as for torch to compute: 8 % of a training step of preset small. Other threads than the main one have
    heaps of 64 MiB, which go back whole once they are empty (14,000 to 22,000 pages for each micro-batch of small), but
    for what the top pad reserves: it is that of two heaps.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TOP_PAD, _TWO_HEAPS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch's CPU allocator or CUDA had no memory left; torch says so in words only."""
    words = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in words or "out of memory" in words
