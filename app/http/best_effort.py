"""Turns for work that no API key pays for: probes, refusals, pages, and input that is costly to parse.

While requests of tenants run, such work gets a tenth of the event loop's time in all, and addresses take turns
(app/common/fair_turns.py), one piece of work each: part of what it costs is only charged later, when connections close.
So a client without a key, whatever it sends and how fast, slows the streams of a key only slightly (promise S28), and a
probe from one address does not wait behind a flood from another. While no tenant's request runs, the share is not
limited.

The share is a token bucket in seconds of the event loop's time. Each turn costs an estimate when it is granted, and
charge() takes what was measured in addition.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

from app.common.fair_turns import FairTurns, may_hold

_SHARE = 0.1
_BURST_SECONDS = 0.005
_MAX_DEBT_SECONDS = 0.05
"""What thousands of connections that close at once, or a stop of this process, may cost: probes wait ten times this."""
_MAX_BYTES = 32 << 20
"""Of input that waits for a turn."""
CONNECTION_SECONDS = 0.0002
"""Time of the event loop for accepting, registering and closing a connection."""
REQUEST_SECONDS = 0.0003
"""Time of the event loop for a short request and its response, from the first byte to the last."""
_TURN = 1.0
_Callback = Callable[[], None]


class BestEffortTurns:
    """Grants one turn per iteration of the event loop at most; owned by the event loop."""

    def __init__(self, share: float = _SHARE) -> None:
        self._share = share
        self._paying = 0
        self._credit = _BURST_SECONDS
        self._updated = 0.0
        self._waiting: dict[str, OrderedDict[_Callback, tuple[float, int]]] = {}
        """By address: its work, the oldest first, with estimate and bytes."""
        self._turns = FairTurns[str]()
        """Of the addresses in `_waiting`."""
        self._bytes: Counter[str] = Counter()
        """Input that waits, by address."""
        self._total_bytes = 0
        self._timer: asyncio.Handle | None = None

    @property
    def is_exhausted(self) -> bool:
        """Whether a new piece of work has to wait."""
        return bool(self._waiting) or (self._credit <= 0 and self._refill() <= 0)

    def has_memory(self, address: str, size: int) -> bool:
        """Whether another `size` bytes of input from this address may wait, which may take as much as is free."""
        free = _MAX_BYTES - self._total_bytes
        return size <= free and may_hold(self._bytes[address], size, free)

    @contextmanager
    def paying(self) -> Iterator[None]:
        """A tenant's request runs in this block, so that the share of everything else is limited."""
        if not self._paying:
            self._refill()
        self._paying += 1
        try:
            yield
        finally:
            self._paying -= 1

    def charge(self, seconds: float) -> None:
        """Takes measured time of the event loop from the share."""
        self._credit = max(-_MAX_DEBT_SECONDS, self._refill() - seconds)

    def request(self, address: str, callback: _Callback, *, seconds: float = 0.0, size: int = 0) -> None:
        """Calls `callback` once when it is the address's turn, never before this returns.

        `seconds` estimates its work; `size` is the bytes of input that it keeps meanwhile.
        """
        if address not in self._waiting:
            self._waiting[address] = OrderedDict()
            self._turns.wait(address, _TURN)
        self._waiting[address][callback] = seconds, size
        self._bytes[address] += size
        self._total_bytes += size
        self._schedule()

    def cancel(self, address: str, callback: _Callback) -> None:
        """Withdraws a request, if it still waits."""
        queue = self._waiting.get(address, OrderedDict())
        if callback in queue:
            self._remove_bytes(address, queue.pop(callback)[1])
            if not queue:
                del self._waiting[address]
                self._turns.leave(address)

    async def turn(self, address: str, seconds: float = REQUEST_SECONDS) -> None:
        """Waits for a turn."""
        if not self.is_exhausted:
            self.charge(seconds)
            return
        granted = asyncio.Event()
        self.request(address, granted.set, seconds=seconds)
        try:
            await granted.wait()
        finally:
            self.cancel(address, granted.set)

    async def turn_for(self, scope: Scope) -> None:
        """Waits for a turn of the client of an HTTP request."""
        await self.turn(scope["client"][0] if scope.get("client") else "")

    def _refill(self) -> float:
        now = time.monotonic()
        earned = (now - self._updated) * self._share if self._paying else _BURST_SECONDS - self._credit
        self._credit = min(_BURST_SECONDS, self._credit + earned)
        self._updated = now
        return self._credit

    def _schedule(self) -> None:
        if self._timer or not self._waiting:
            return
        self._refill()
        loop = asyncio.get_running_loop()
        if self._credit > 0:
            self._timer = loop.call_soon(self._grant)
        else:
            # Not much later than the last tenant's request ends, from when on the share is not limited.
            self._timer = loop.call_later(min(0.05, -self._credit / self._share + 1e-4), self._grant)

    def _grant(self) -> None:
        self._timer = None
        if self._refill() > 0 and self._waiting:
            address = next(iter(self._turns))
            queue = self._waiting[address]
            callback, (seconds, size) = queue.popitem(last=False)
            self._turns.take(address, _TURN if queue else None)
            if not queue:
                del self._waiting[address]
            self._remove_bytes(address, size)
            self.charge(seconds)
            try:
                callback()
            finally:  # a callback that fails must not leave the others waiting
                self._schedule()
        else:
            self._schedule()

    def _remove_bytes(self, address: str, size: int) -> None:
        self._total_bytes -= size
        self._bytes[address] -= size
        if not self._bytes[address]:
            del self._bytes[address]
