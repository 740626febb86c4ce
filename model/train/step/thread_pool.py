"""Thread pool for training steps, and how the C library returns freed memory.

torch parallelizes every operation and waits for all threads after each; a training step has thousands. If another
program uses one of the cores, each wait costs a time slice of the system's scheduler, and the waiting threads spin
(figures in PERFORMANCE.md). Here threads synchronize a few times per step, and sleep while they wait.
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

T = TypeVar("T")
R = TypeVar("R")


def keep_freed_memory() -> None:
    """Makes glibc reuse freed memory instead of returning it to the system; does nothing with other C libraries.

    By default, glibc returns tensors of a megabyte as soon as they are freed, and the system spends as much time
    zeroing each new one as torch spends computing it: 8 % of a training step of preset small. Threads other than the
    main one have heaps of 64 MiB, which glibc returns once empty (14,000 to 22,000 pages per micro-batch of small),
    except for the top pad, hence a top pad of two heaps.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TOP_PAD, 2**27)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch's CPU allocator or CUDA ran out of memory; torch reports it only in the message."""
    message = str(error)
    return isinstance(error, MemoryError) or "allocate memory" in message or "out of memory" in message


def map_shares(work: Callable[[Sequence[T]], R], items: Sequence[T], workers: int) -> list[R]:
    """work(share) for each worker's share, in order; this thread computes the last share, so it can handle signals.

    The shares depend only on the number of items and workers, not on timing. Returns or raises when all have ended.
    """
    workers = max(1, min(workers, len(items)))
    size, remainder = divmod(len(items), workers)
    bounds = [i * size + min(i, remainder) for i in range(workers + 1)]
    shares = [items[start:stop] for start, stop in pairwise(bounds)]
    with (
        _torch_threads(torch.get_num_threads() // workers) as set_threads,
        ThreadPoolExecutor(workers, initializer=set_threads) as pool,
    ):
        others = [pool.submit(work, share) for share in shares[:-1]]
        own = work(shares[-1])
        return [*(other.result() for other in others), own]


def run_each(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """work(item) for each item on a pool with torch's number of threads, starting in order; the results, in order.

    The assignment to threads depends on timing, so it must not matter. Returns or raises when all have ended.
    """
    workers = min(torch.get_num_threads(), len(items))
    with _torch_threads(1) as set_threads, ThreadPoolExecutor(workers, initializer=set_threads) as pool:
        done = [pool.submit(work, item) for item in items]
    return [item.result() for item in done]


@contextmanager
def _torch_threads(count: int) -> Iterator[Callable[[], None]]:
    """Within the block, torch uses `count` threads per operation in this thread; the result sets others to the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, count))
    try:
        yield lambda: torch.set_num_threads(max(1, count))
    finally:
        torch.set_num_threads(before)
