"""Work on texts that takes a while, off the event loop and one at a time. Knows no tokenizer.

A megabyte of text may become a million tokens, which take half a second and some hundred megabytes on the way. 5,000
characters take about 0.9 ms: less than a step of the engine, so that nobody's next token waits for them. What waits
for its turn is bounded, since each text is held until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from app.engine.errors import Unavailable

_LONG, _MOST_WAITING = 5_000, 16 << 20
_T = TypeVar("_T")


class LongTexts:
    """One thread, owned by the event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long-texts")
        self._waiting = 0

    async def run(self, length: int, work: Callable[[], _T]) -> _T:
        """The result of `work` on something of that many characters or tokens: at once where it is short.

        Raises Unavailable where others have brought too much already.
        """
        if length <= _LONG:
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
