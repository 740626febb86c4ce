"""Turns by tenant for work that must be done on the event loop: parsing large bodies, writing long answers.

A parser of a megabyte holds the interpreter for up to 50 ms, in whichever thread it runs. One turn at a time, and a
rest of the same length after each, leave at least half of the loop to everything else: streams, health checks, short
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.access.tenant_queue import TenantQueue, WorkAccount
from app.common.fault_injection import is_armed

_MOST_BUSY = 0.5
_MOST_BODIES, _MOST_BYTES = 1024, 64 << 20
_SMALL_BODY = 16 << 10
_SLICE_SECONDS = 0.001


class LoopShare:
    """The queue in front of the event loop's longer work."""

    def __init__(self) -> None:
        self._queue = TenantQueue(1, most_jobs=_MOST_BODIES, most_size=_MOST_BYTES, most_busy=_MOST_BUSY)

    @asynccontextmanager
    async def parsing(self, body: bytes | bytearray, account: WorkAccount) -> AsyncIterator[None]:
        """A block that parses `body` and does not await; a small one waits for no turn. Raises Busy."""
        if len(body) <= _SMALL_BODY or _is_unlimited():
            yield
            return
        with self._queue.admitted(account, len(body)), await self._queue.acquire(account, len(body)):
            yield

    async def pause(self, account: WorkAccount) -> None:
        """Returns when the caller may work on for another millisecond or so."""
        if _is_unlimited():
            await asyncio.sleep(0)
            return
        turn = await self._queue.acquire(account, 1)
        # It ends by itself: the caller may stop, or wait for something else, without a word.
        asyncio.get_running_loop().call_later(_SLICE_SECONDS, turn.end, _SLICE_SECONDS)

    def close(self) -> None:
        """Cancels what waits."""
        self._queue.close()


def _is_unlimited() -> bool:
    return is_armed("loop_share.unlimited")
