"""Threads that tokenize long texts, where tenants take turns.

A megabyte of text may become a million tokens, which takes half a second and some hundred megabytes. 5,000 characters
take about 2 ms, less than an engine step, and are tokenized on the event loop. Longer texts wait for a turn in a
WorkerTurns; work that is split into slices waits for a turn before each.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TypeVar

from app.access.worker_turns import TenantThreads, WorkAccount
from app.common.operating_system import lower_priority

_T = TypeVar("_T")
_MAX_INLINE_LENGTH = 5_000
_WORKERS, _MAX_JOBS, _MAX_CHARACTERS = 2, 1024, 32 << 20
SLICE = 1 << 15
"""Characters of a slice."""
_NICE = 5  # a third of the event loop's share of a contended core; a higher value would starve tokenization


class TokenizerPool:
    """Threads for long texts; owned by the event loop."""

    def __init__(self) -> None:
        self._threads = TenantThreads(
            "tokenizer",
            _WORKERS,
            max_jobs=_MAX_JOBS,
            max_size=_MAX_CHARACTERS,
            initializer=partial(lower_priority, _NICE),
        )

    async def run(self, length: int, work: Callable[[], _T], account: WorkAccount) -> _T:
        """The result of `work` on `length` characters or tokens: at once for a short text, else in one turn.

        Raises Busy if this tenant has too much text in the queue.
        """
        if _is_short(length):
            return work()
        with self._threads.admitted(account, length):
            return await self._threads.run(work, account, length)

    async def run_slices(self, length: int, slices: Generator[None, None, _T], account: WorkAccount) -> _T:
        """Like run(), for work that yields after each slice: one turn a slice, so that other tenants run in between."""
        if _is_short(length):
            while not (done := _advance(slices)):
                pass
            return done[0]
        with self._threads.admitted(account, length):
            while not (done := await self._threads.run(lambda: _advance(slices), account, min(length, SLICE))):
                pass
            return done[0]

    def close(self) -> None:
        """Drops queued work; running work finishes."""
        self._threads.close()


def _advance(slices: Generator[None, None, _T]) -> tuple[_T] | None:
    try:
        next(slices)
    except StopIteration as end:
        return (end.value,)
    return None


def _is_short(length: int) -> bool:
    return length <= _MAX_INLINE_LENGTH
