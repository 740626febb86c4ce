"""Each signal reaches the event loop once, however close together they arrive; results of threads are shared."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from app.common.event_loop import ThreadedResult
from tests.support import ROOT
from tests.support.async_test import async_test

_PROGRAM = """
import asyncio, signal, sys, threading
from app.common import event_loop

def add(loop, number, act):
    if sys.argv[1] == "ours":
        event_loop.on_signal(loop, number, act)
    else:
        loop.add_signal_handler(number, act)

async def main():
    loop, taken = asyncio.get_running_loop(), []
    # One that comes while another is being taken in, which wakes the loop: its handler runs right there.
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGTERM))
    add(loop, signal.SIGTERM, lambda: taken.append("term"))
    for number in range(5):
        first = threading.Timer(0.02, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
        first.start()
        while first.is_alive() or len(taken) <= number:
            await asyncio.sleep(0.05)
    print(len(taken))

event_loop.run(main())
"""


def _chosen_loop(way: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, way]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_signal_during_the_handling_of_another_is_delivered_once() -> None:
    assert _chosen_loop("ours") == 5


def test_uvloop_delivers_such_a_signal_twice() -> None:
    """When this fails, event_loop.on_signal() is no longer needed."""
    pytest.importorskip("uvloop")
    assert _chosen_loop("uvloop's") > 5


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
