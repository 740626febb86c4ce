"""Turns of tenants on shared workers: text threads, grammar and template processes, the event loop.

Every job that may take long waits for a turn. Three rules keep one tenant's jobs from delaying another's:

* Order: fair turns by worker time (app/common/fair_turns.py), estimated before and measured after: between
  two tenants, the smaller job goes first; inside a tenant, first come, first served.
* Workers: a tenant never occupies the last worker, so that another tenant finds one that is free.
* Bounds: a dynamic threshold, so that there is always space left for another tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from app.access.rate_limiter import UNLIMITED, Reservation
from app.common.errors import Unavailable
from app.common.fair_turns import FairTurns, may_hold

_DECAY = 0.9
_T = TypeVar("_T")


class Busy(Unavailable):
    """The queue has no space for another job of this tenant."""


@dataclass(frozen=True, slots=True)
class WorkAccount:
    """The tenant that a job is done for, and the reservation that is charged for it."""

    tenant: str = ""
    """The cache namespace of its key; all requests share one where the service has no keys."""
    reservation: Reservation = UNLIMITED


@dataclass(slots=True, eq=False)
class _Job:
    account: WorkAccount
    cost: int
    granted: asyncio.Future[Turn]


@dataclass(slots=True, eq=False)
class _Tenant:
    jobs: int = 0
    """Admitted, waiting or running."""
    size: int = 0
    running: int = 0
    waiting: deque[_Job] = field(default_factory=deque)


class Turn:
    """Exclusive use of one worker until end() is called; as a context manager, until the block ends."""

    def __init__(self, worker: int, started: float, end: Callable[[float], None]) -> None:
        self.worker = worker
        """Its index; the lowest free one."""
        self._started = started
        self._end: Callable[[float], None] | None = end

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_error: object) -> None:
        self.end()

    def end(self, seconds: float | None = None) -> None:
        """Frees the worker and charges `seconds` of work, or the time since the turn began; any number of times."""
        if end := self._end:
            self._end = None
            end(time.monotonic() - self._started if seconds is None else seconds)


class WorkerTurns:
    """Admits jobs and grants turns. Owned by the event loop."""

    def __init__(self, workers: int, *, max_jobs: int, max_size: int, max_busy_share: float = 1.0) -> None:
        """`max_size` bounds the sum of the admitted jobs' sizes, in any unit (characters, bytes).

        `max_busy_share` is the share of time that a worker may work: it rests after each turn in proportion.
        """
        self._max_jobs, self._max_size = max_jobs, max_size
        self._rest_ratio = 1 / max_busy_share - 1
        self._max_running = max(1, workers - 1)
        self._idle = set(range(workers))
        self._tenants: dict[str, _Tenant] = {}  # at most one per key
        self._turns = FairTurns[_Tenant]()
        self._seconds, self._cost = 1e-9, 1.0
        """Of recent jobs, decayed: worker time, and estimated cost. Before the first one, costs only order the jobs."""

    @contextmanager
    def admitted(self, account: WorkAccount, size: int) -> Iterator[None]:
        """Reserves queue space for a job's inputs and results inside the block. Raises Busy if there is none."""
        tenant = self._tenants.setdefault(account.tenant, _Tenant())
        self._check(tenant, size)
        tenant.jobs += 1
        tenant.size += size
        try:
            yield
        finally:
            tenant.jobs -= 1
            tenant.size -= size

    async def acquire(self, account: WorkAccount, cost: int) -> Turn:
        """Waits for a turn on some worker. `cost` estimates the work in any unit: characters, bytes."""
        tenant = self._tenants.setdefault(account.tenant, _Tenant())
        job = _Job(account, cost, asyncio.get_running_loop().create_future())
        tenant.waiting.append(job)
        if len(tenant.waiting) == 1:
            self._wait(tenant)
        self._dispatch()
        try:
            return await job.granted
        except BaseException:
            if job in tenant.waiting:
                tenant.waiting.remove(job)
                self._wait(tenant)
            elif job.granted.done() and not job.granted.cancelled():
                job.granted.result().end(0.0)
            raise

    def close(self) -> None:
        """Cancels the jobs that wait for a turn."""
        for tenant in self._tenants.values():
            while tenant.waiting:
                tenant.waiting.popleft().granted.cancel()
            self._wait(tenant)

    def _check(self, tenant: _Tenant, size: int) -> None:
        jobs = sum(other.jobs for other in self._tenants.values())
        total = sum(other.size for other in self._tenants.values())
        if not (
            may_hold(tenant.jobs, 1, self._max_jobs - jobs) and may_hold(tenant.size, size, self._max_size - total)
        ):
            wait = min(60, 1 + round(self._expected_seconds(tenant.size)))
            raise Busy(f"too many requests of this kind wait already: try again in {wait} s", wait)

    def _wait(self, tenant: _Tenant) -> None:
        """Updates the order of turns when a tenant's next job is another one, or none is left."""
        if tenant.waiting:
            self._turns.wait(tenant, self._expected_seconds(tenant.waiting[0].cost))
        else:
            self._turns.leave(tenant)

    def _dispatch(self) -> None:
        while self._idle and (tenant := self._next_tenant()):
            if tenant.waiting[0].granted.cancelled():
                tenant.waiting.popleft()
                self._wait(tenant)
            else:
                self._grant(tenant)

    def _next_tenant(self) -> _Tenant | None:
        return next((tenant for tenant in self._turns if tenant.running < self._max_running), None)

    def _grant(self, tenant: _Tenant) -> None:
        job, estimate = tenant.waiting.popleft(), self._turns.begin(tenant)
        self._wait(tenant)
        worker = min(self._idle)
        self._idle.remove(worker)
        tenant.running += 1

        def end(seconds: float) -> None:
            tenant.running -= 1
            self._turns.end(tenant, seconds - estimate)
            job.account.reservation.charge_work(seconds, time.monotonic())
            self._seconds, self._cost = self._seconds * _DECAY + seconds, self._cost * _DECAY + job.cost
            if rest := seconds * self._rest_ratio:
                asyncio.get_running_loop().call_later(rest, self._free, worker)
            else:
                self._free(worker)

        job.granted.set_result(Turn(worker, time.monotonic(), end))

    def _free(self, worker: int) -> None:
        self._idle.add(worker)
        self._dispatch()

    def _expected_seconds(self, cost: int) -> float:
        return cost * self._seconds / self._cost


class TenantThreads:
    """Threads that tenants take in turns. Owned by the event loop."""

    def __init__(
        self, name: str, workers: int, *, max_jobs: int, max_size: int, initializer: Callable[[], None] | None = None
    ) -> None:
        """`max_jobs` and `max_size` as in WorkerTurns; each thread calls `initializer` first."""
        self._queue = WorkerTurns(workers, max_jobs=max_jobs, max_size=max_size)
        self._threads = ThreadPoolExecutor(workers, name, initializer)

    def admitted(self, account: WorkAccount, size: int) -> AbstractContextManager[None]:
        """WorkerTurns.admitted(). Raises Busy."""
        return self._queue.admitted(account, size)

    async def run(self, work: Callable[[], _T], account: WorkAccount, cost: int) -> _T:
        """The result of `work`, which a thread does in one turn."""
        turn = await self._queue.acquire(account, cost)
        loop = asyncio.get_running_loop()

        def end(_: Future[_T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(turn.end)

        running = self._threads.submit(work)
        running.add_done_callback(end)  # not when the client disconnects: the thread is busy until the work is done
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Drops queued work; running work finishes."""
        self._queue.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


# Parsing a megabyte holds the GIL for up to 50 ms, in any thread. One turn at a time, each followed by a rest of the
# same length, leaves at least half of the event loop's time to everything else: streams, health checks, short requests.

_MAX_BUSY_SHARE = 0.5
_MAX_BODIES, _MAX_BYTES = 1024, 64 << 20
_SMALL_BODY = 16 << 10
_SLICE_SECONDS = 0.001


class LoopShare:
    """Limits the share of the event loop's time that longer work takes."""

    def __init__(self) -> None:
        self._queue = WorkerTurns(1, max_jobs=_MAX_BODIES, max_size=_MAX_BYTES, max_busy_share=_MAX_BUSY_SHARE)

    @asynccontextmanager
    async def parsing(self, body: bytes | bytearray, account: WorkAccount) -> AsyncIterator[None]:
        """Grants a turn to a block that parses `body` and does not await; small bodies skip the queue. Raises Busy."""
        if len(body) <= _SMALL_BODY:
            yield
            return
        with self._queue.admitted(account, len(body)), await self._queue.acquire(account, len(body)):
            yield

    async def pause(self, account: WorkAccount) -> None:
        """Waits for a turn of about a millisecond."""
        turn = await self._queue.acquire(account, 1)
        # The turn ends by itself: the caller may stop or wait for something else without notice.
        asyncio.get_running_loop().call_later(_SLICE_SECONDS, turn.end, _SLICE_SECONDS)

    def close(self) -> None:
        """Cancels all waiting jobs."""
        self._queue.close()
