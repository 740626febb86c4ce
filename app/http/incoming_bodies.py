"""Memory for request bodies that are arriving, which nothing else has admitted yet.

A body of more than SMALL_BODY bytes is read only after it has reserved memory for its declared length (for the largest
length that is allowed, if it is chunked). Until then its connection is not read, so that the kernel slows the client
down. A tenant may always reserve one body, and further ones as long as it holds no more than is free, which leaves
memory for other tenants' bodies (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2),
1998).
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.common.errors import RateLimitExceeded

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
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()
        """By tenant, the one whose turn is next first."""

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
        free = self._max_bytes - self._reserved.total()
        return not self._reserved[tenant] or self._reserved[tenant] + size <= free

    async def _wait(self, tenant: str, size: int) -> None:
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= _MAX_WAITING:
            raise self._too_many(tenant)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append((size, granted))
        try:
            async with asyncio.timeout(self._max_wait):
                await granted
        except BaseException as error:
            if granted.done() and not granted.cancelled():
                self._release(tenant, size)
            else:
                if (size, granted) in queue:
                    queue.remove((size, granted))
                self._forget_if_empty(tenant)
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
        """Grants what fits, one body of each tenant in turn."""
        stuck = 0
        while self._waiting and stuck < len(self._waiting):
            tenant = next(iter(self._waiting))
            self._waiting.move_to_end(tenant)
            size, granted = self._waiting[tenant][0]
            if granted.cancelled():  # its body leaves in this very iteration of the event loop
                self._waiting[tenant].popleft()
                self._forget_if_empty(tenant)
                continue
            if not self._fits(tenant, size):
                stuck += 1
                continue
            stuck = 0
            self._waiting[tenant].popleft()
            self._forget_if_empty(tenant)
            self._reserved[tenant] += size
            granted.set_result(None)

    def _forget_if_empty(self, tenant: str) -> None:
        if tenant in self._waiting and not self._waiting[tenant]:
            del self._waiting[tenant]

    def _too_many(self, tenant: str) -> RateLimitExceeded:
        message = (
            f"{self._reserved[tenant] >> 20} MiB of this key's request bodies are still arriving: finish sending them, "
            "or send fewer large bodies at a time"
        )
        return RateLimitExceeded(message, _RETRY_AFTER_SECONDS)
