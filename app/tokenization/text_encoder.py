"""Encodes a request's texts off the event loop: in this process, in worker threads, or in a sandboxed process.

A megabyte of text may become a million tokens, which takes half a second and some hundred megabytes. 5,000 characters
take about 2 ms, less than an engine step, and are tokenized on the event loop. Longer texts wait for a turn in a
TenantQueue; work that is split into slices waits for a turn before each.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from app.access.tenant_queue import TenantQueue, WorkAccount
from app.common.errors import EngineFailed, InvalidRequest
from app.tokenization.tokenizer_sandbox import TokenizerSandbox, TooSlow
from model.files import one_line
from model.tokenizer.token_spans import CompactSpans
from model.tokenizer.tokenizer import Tokenizer

_SECONDS, _SECONDS_PER_CHARACTER, _MIN_SECONDS = 2.0, 1e-5, 0.1
"""Time limits for all texts of a request, and a minimum for each: about twenty times the time of known tokenizers."""
_POOL_LENGTH = 1 << 14
_T = TypeVar("_T")
_log = logging.getLogger("inkstream")


class TextEncoder:
    """Encodes the texts of one request, and limits the time that they take together.

    A proven tokenizer runs in this process. An unproven one runs in the sandbox, so that calls block: make them from a
    worker thread, which `pool_length` ensures.
    """

    def __init__(self, tokenizer: Tokenizer, sandbox: TokenizerSandbox | None = None) -> None:
        self.tokenizer = tokenizer
        self._sandbox = sandbox
        self._seconds_left = _SECONDS

    def pool_length(self, length: int) -> int:
        """The length for TokenizerPool.run(): with a sandbox, no text is short enough for the event loop."""
        return max(length, _POOL_LENGTH) if self._sandbox else length

    def encode(self, text: str) -> list[int]:
        """Tokenizer.encode(). Raises InvalidRequest, EngineFailed."""
        if self._sandbox is None:
            with _panics_reported():
                return self.tokenizer.encode(text)
        return self._timed(text, lambda box, seconds: box.encode(text, seconds=seconds))

    def encode_plain(self, text: str) -> list[int]:
        """Without added special tokens. Raises InvalidRequest, EngineFailed."""
        if self._sandbox is None:
            with _panics_reported():
                return self.tokenizer.encode_many([text])[0]
        return self._timed(text, lambda box, seconds: box.encode(text, is_plain=True, seconds=seconds))

    def span_slices(self, text: str, *, add_special_tokens: bool) -> Generator[None, None, CompactSpans]:
        """Tokenizer.span_slices(), in one slice with a sandbox. Raises InvalidRequest, EngineFailed."""
        special = add_special_tokens
        if self._sandbox is None:
            with _panics_reported():
                return (yield from self.tokenizer.span_slices(text, add_special_tokens=special))
        return self._timed(text, lambda box, seconds: box.encode_spans(text, is_plain=not special, seconds=seconds))

    def _timed(self, text: str, call: Callable[[TokenizerSandbox, float], _T]) -> _T:
        assert self._sandbox
        self._seconds_left += len(text) * _SECONDS_PER_CHARACTER
        started = time.monotonic()
        try:
            return call(self._sandbox, max(self._seconds_left, _MIN_SECONDS))
        except TooSlow as error:
            raise InvalidRequest(
                f"the model's tokenizer {error} for this text: shorten it, or break up long runs of one kind of "
                "character"
            ) from None
        finally:
            self._seconds_left -= time.monotonic() - started


@contextmanager
def _panics_reported() -> Iterator[None]:
    """Turns panics of the tokenizers library, which are not Exceptions and would end the thread, into EngineFailed."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        _log.error("the tokenizer failed on a text: %s", one_line(str(error)[:200]))
        raise EngineFailed("the model's tokenizer failed on this text") from None


_MAX_INLINE_LENGTH = 5_000
_WORKERS, _MAX_JOBS, _MAX_CHARACTERS = 2, 1024, 32 << 20
SLICE = 1 << 15
"""Characters of a slice."""
_NICE = 5  # a third of the event loop's share of a contended core; a higher value would starve tokenization


class TokenizerPool:
    """Threads and the queue in front of them; owned by the event loop."""

    def __init__(self) -> None:
        self._queue = TenantQueue(_WORKERS, max_jobs=_MAX_JOBS, max_size=_MAX_CHARACTERS)
        self._threads = ThreadPoolExecutor(_WORKERS, thread_name_prefix="tokenizer", initializer=_lower_priority)

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
    return length <= _MAX_INLINE_LENGTH


def _lower_priority() -> None:
    """Lowers this thread's priority (Linux has a nice value per thread), so that streams win on contended cores."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))
