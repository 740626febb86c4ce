"""The result of a thread is computed once and shared; a failed one is computed again."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from app.common.threaded_result import ThreadedResult
from tests.support.async_test import async_test


@async_test
async def test_result_is_computed_once_and_in_a_thread() -> None:
    threads: list[int] = []

    def compute() -> str:
        threads.append(threading.get_ident())
        time.sleep(0.02)
        return "text"

    result = ThreadedResult(compute)
    leaves, *others = (asyncio.ensure_future(result.get()) for _ in range(10))
    await asyncio.sleep(0)
    leaves.cancel()
    assert await asyncio.gather(*others) == ["text"] * 9
    assert await result.get() == "text"
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@async_test
async def test_result_that_failed_is_computed_again() -> None:
    attempts: list[int] = []

    def compute() -> int:
        attempts.append(0)
        return 1 // (len(attempts) - 1)

    result = ThreadedResult(compute)
    with pytest.raises(ZeroDivisionError):
        await result.get()
    assert await result.get() == 1
