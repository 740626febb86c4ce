"""Memory for request bodies that are arriving, which nothing else has admitted yet.

A body of more than SMALL_BODY bytes is read only after it has reserved memory for its declared length (for the largest
length that is allowed, if it is chunked). Until then its connection is not read, so that the kernel slows the client
down. A tenant may always reserve one body, and further ones as long as it holds no more than is free, which leaves
memory for other tenants' bodies. Bodies that wait take fair turns of tenants by size (app/common/fair_turns.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.common.errors import RateLimitExceeded
from app.common.fair_turns import FairTurns, may_hold

SMALL_BODY = 16 << 10
"""Bytes of a body that are read without a reservation, and after which a connection is not read until they are used."""
_MAX_BYTES = 32 << 20
_MAX_WAITING = 32
"""Bodies of one tenant that may wait. Each holds what its client sent with the headers, about 64 KiB."""
_RETRY_AFTER_SECONDS = 5


class IncomingBodies:
    """Reservations by tenant; owned by the event loop."""

    def __init__(self, max_wait: float, max_bytes: int = _MAX_BYTES) -> None:
        """`max_wait`: seconds that a body may wait for memory."""
        self._max_wait, self._max_bytes = max_wait, max_bytes
        self._reserved: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[None]]]] = {}
        """By tenant, the oldest first."""
        self._turns = FairTurns[str]()
        """Of the tenants in `_waiting`."""

    @asynccontextmanager
    async def reserved(self, tenant: str, size: int) -> AsyncIterator[None]:
        """Reserves memory inside the block, and waits for it. Raises RateLimitExceeded."""
        if size <= SMALL_BODY:
            yield
            return
        if not self._fits(tenant, size) or tenant in self._waiting:
            await self._wait(tenant, size)
        else:
            self._reserved[tenant] += size
        try:
            yield
        finally:
            self._release(tenant, size)

    def _fits(self, tenant: str, size: int) -> bool:
        return may_hold(self._reserved[tenant], size, self._max_bytes - self._reserved.total())

    async def _wait(self, tenant: str, size: int) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= _MAX_WAITING:
            raise self._too_many(tenant)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append((size, granted))
        if len(queue) == 1:
            self._turns.wait(tenant, size)
        try:
            async with asyncio.timeout(self._max_wait):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._release(tenant, size)
            else:
                if (size, granted) in queue:
                    queue.remove((size, granted))
                    self._update_turn(tenant)
                self._grant()  # a smaller body behind this one may fit
            if isinstance(error, TimeoutError):
                raise self._too_many(tenant) from None
            raise

    def _release(self, tenant: str, size: int) -> None:
        self._reserved[tenant] -= size
        if not self._reserved[tenant]:
            del self._reserved[tenant]
        self._grant()

    def _grant(self) -> None:
        """Grants what fits, in turns of tenants."""
        while (tenant := next(filter(self._is_first_ready, self._turns), None)) is not None:
            size, granted = self._waiting[tenant].popleft()
            if not granted.cancelled():
                self._turns.end(tenant, size - self._turns.begin(tenant))
                self._reserved[tenant] += size
                granted.set_result(None)
            self._update_turn(tenant)

    def _is_first_ready(self, tenant: str) -> bool:
        """Whether the tenant's first body fits, or leaves in this very iteration of the event loop."""
        size, granted = self._waiting[tenant][0]
        return granted.cancelled() or self._fits(tenant, size)

    def _update_turn(self, tenant: str) -> None:
        """Updates the order when the tenant's first body is another one, or none is left."""
        if queue := self._waiting[tenant]:
            self._turns.wait(tenant, queue[0][0])
        else:
            del self._waiting[tenant]
            self._turns.leave(tenant)

    def _too_many(self, tenant: str) -> RateLimitExceeded:
        message = (
            f"{self._reserved[tenant] >> 20} MiB of this key's request bodies are still arriving: finish sending them, "
            "or send fewer large bodies at a time"
        )
        return RateLimitExceeded(message, _RETRY_AFTER_SECONDS)
