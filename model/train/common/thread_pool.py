"""Threads that each do their own share of a piece of work. Knows nothing of training.

torch shares out every single operation and waits for all threads behind each; a training step has thousands. Where
another program wants one of the cores, each of these waits costs a turn of the system's scheduler (figures in
PERFORMANCE.md). Here threads meet once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch

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
