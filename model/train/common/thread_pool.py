"""Threads that share one piece of work, and how the C library returns freed memory.

torch parallelizes every single operation and waits for all threads after each; a training step has thousands. If
another program uses one of the cores, each of these waits costs a time slice of the system's scheduler (figures in
PERFORMANCE.md). Here threads synchronize once a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch

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


T = TypeVar("T")
R = TypeVar("R")


def in_shares(work: Callable[[Sequence[T]], R], items: Sequence[T], workers: int) -> list[R]:
    """work(share) of each worker's share, in order; the last is done by this thread, so it may react to signals.

    Which item is whose depends on their numbers alone, never on time. Returns or raises when all have ended.
    """
    workers = max(1, min(workers, len(items)))
    size, more = divmod(len(items), workers)
    bounds = [i * size + min(i, more) for i in range(workers + 1)]
    shares = [items[start:stop] for start, stop in pairwise(bounds)]
    with (
        _threads_each(torch.get_num_threads() // workers) as begin,
        ThreadPoolExecutor(workers, initializer=begin) as pool,
    ):
        others = [pool.submit(work, share) for share in shares[:-1]]
        own = work(shares[-1])
        return [*(other.result() for other in others), own]


def one_by_one(work: Callable[[T], object], items: Sequence[T]) -> None:
    """work(item) of each item on one thread, as many at a time as torch has threads; begins with the first.

    Who does which depends on time, so it must not matter. Returns or raises when all have ended.
    """
    workers = min(torch.get_num_threads(), len(items))
    with _threads_each(1) as begin, ThreadPoolExecutor(workers, initializer=begin) as pool:
        done = [pool.submit(work, item) for item in items]
    for item in done:
        item.result()


@contextmanager
def _threads_each(count: int) -> Iterator[Callable[[], None]]:
    """Within the block so many threads share an operation of this thread, and of those that call what is yielded."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, count))
    try:
        yield lambda: torch.set_num_threads(max(1, count))
    finally:
        torch.set_num_threads(before)
