"""Work on texts that takes a while, off the event loop and one at a time. Knows no tokenizer.

A megabyte of text may become a million tokens, which take half a second and some hundred megabytes on the way. 5,000
characters take about 0.9 ms: less than a step of the engine, so that nobody's next token waits for them. What waits
for its turn is bounded, since each text is held until then.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from app.engine.errors import Unavailable
from app.faults import is_armed

_LONG, _MOST_WAITING = 5_000, 16 << 20
_NICE = 5  # a third of the event loop's share of a core that both want; more would starve texts beside busy engines
_T = TypeVar("_T")


class LongTexts:
    """One thread, owned by the event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="long-texts", initializer=_yield_to_the_loop
        )
        self._waiting = 0

    async def run(self, length: int, work: Callable[[], _T]) -> _T:
        """The result of `work` on something of that many characters or tokens: at once where it is short.

        Raises Unavailable where others have brought too much already.
        """
        if length <= _LONG or is_armed("long_texts.on_loop"):
            return work()
        if self._waiting and self._waiting + length > _MOST_WAITING:
            raise Unavailable(
                "too many long texts wait to be read: try again in a moment", 1 + self._waiting // 2_000_000
            )
        self._waiting += length
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._waiting -= length

    def close(self) -> None:
        """What waits is dropped; what runs ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _yield_to_the_loop() -> None:
    """Linux counts a nice value for each thread: streams come first where there are fewer cores than work."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))
