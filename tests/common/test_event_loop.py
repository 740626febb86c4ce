"""Each signal reaches the event loop once, however close together they arrive."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT

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
