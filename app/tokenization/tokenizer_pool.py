"""Worker threads for long texts: tokenizing, detokenizing and describing tokens off the event loop.

A megabyte of text may become a million tokens, which takes half a second and some hundred megabytes. 5,000 characters
take about 2 ms, less than an engine step, and are tokenized on the event loop. Longer texts wait for a turn in a
TenantQueue; work that is split into slices waits for a turn before each.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from app.access.tenant_queue import TenantQueue, WorkAccount
from app.common.fault_injection import is_armed

_SHORT = 5_000
_WORKERS, _MOST_JOBS, _MOST_CHARACTERS = 2, 1024, 32 << 20
SLICE = 1 << 15
"""Characters of a slice."""
_NICE = 5  # a third of the event loop's share of a contended core; a higher value would starve tokenization
_T = TypeVar("_T")


class TokenizerPool:
    """Threads and the queue in front of them; owned by the event loop."""

    def __init__(self) -> None:
        self._queue = TenantQueue(_WORKERS, most_jobs=_MOST_JOBS, most_size=_MOST_CHARACTERS)
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="long-texts", initializer=_lower_priority)

    async def run(self, length: int, work: Callable[[], _T], account: WorkAccount) -> _T:
        """The result of `work` on `length` characters or tokens: at once for a short text, else in one turn.

        Raises Busy if this tenant has too much text in the queue.
        """
        if _is_short(length):
            return work()
        with self._queue.admitted(account, length):
            return await self._in_thread(work, length, account)

    async def run_slices(self, length: int, slices: Generator[None, None, _T], account: WorkAccount) -> _T:
        """Like run(), for work that yields after each slice: one turn a slice, so that other tenants run in between."""
        if _is_short(length):
            while not (done := _advance(slices)):
                pass
            return done[0]
        with self._queue.admitted(account, length):
            while not (done := await self._in_thread(lambda: _advance(slices), min(length, SLICE), account)):
                pass
            return done[0]

    def close(self) -> None:
        """Drops queued work; running work finishes."""
        self._queue.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], _T], cost: int, account: WorkAccount) -> _T:
        turn = await self._queue.acquire(account, cost)
        loop = asyncio.get_running_loop()

        def end(_running: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turn.end)

        running = self._threads.submit(work)
        running.add_done_callback(end)  # not when the client disconnects: the thread is busy until the work is done
        return await asyncio.wrap_future(running)


def _advance(slices: Generator[None, None, _T]) -> tuple[_T] | None:
    try:
        next(slices)
    except StopIteration as end:
        return (end.value,)
    return None


def _is_short(length: int) -> bool:
    return length <= _SHORT or is_armed("long_texts.on_loop")


def _lower_priority() -> None:
    """Lowers this thread's priority (Linux has a nice value per thread), so that streams win on contended cores."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))
