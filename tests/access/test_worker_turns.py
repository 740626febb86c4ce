"""Turns on workers: order, the last worker, bounds, charges. The tests set how long a worker takes."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from app.access.rate_limiter import RateLimiter
from app.access.tenant import RateLimits, Tenant
from app.access.worker_turns import Busy, LoopShare, Turn, WorkAccount, WorkerTurns
from tests.support.async_test import async_test


def _queue(workers: int = 2, **options: Any) -> WorkerTurns:
    return WorkerTurns(workers, **{"max_jobs": 64, "max_size": 1000, **options})


class QueueClients:
    """Submits waiting jobs and records which tenant gets a turn, in order."""

    def __init__(self, queue: WorkerTurns) -> None:
        self.queue = queue
        self.order: list[str] = []
        self.turns: list[tuple[str, Turn]] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self, tenant: str, cost: int = 1) -> asyncio.Task[None]:
        """Adds a job."""

        async def job() -> None:
            turn = await self.queue.acquire(WorkAccount(tenant), cost)
            self.order.append(tenant)
            self.turns.append((tenant, turn))

        self.tasks.append(asyncio.create_task(job()))
        await asyncio.sleep(0)
        return self.tasks[-1]

    async def end(self, seconds: float = 1.0) -> None:
        """Ends the oldest running job."""
        self.turns.pop(0)[1].end(seconds)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@async_test
async def test_a_tenant_never_occupies_the_last_worker() -> None:
    clients = QueueClients(_queue(workers=3))
    for _ in range(10):
        await clients.join("a")
    assert clients.order == ["a", "a"]
    await clients.join("b")
    assert clients.order == ["a", "a", "b"]


@async_test
async def test_the_tenant_with_the_least_recent_work_is_next_in_any_order_of_arrival() -> None:
    clients = QueueClients(_queue())
    for _ in range(5):
        await clients.join("a")
    await clients.join("other")  # both workers are busy
    for _ in range(3):
        await clients.join("b")
    for _ in range(6):
        await clients.end()
    assert clients.order[:2] == ["a", "other"]
    assert clients.order[2:4] in (["b", "a"], ["b", "b"])


@async_test
async def test_tenants_with_waiting_jobs_get_equal_time_whatever_their_jobs_cost() -> None:
    queue, spent = _queue(workers=1), Counter[str]()
    seconds = {"a": 0.9, "b": 0.1, "c": 0.3}
    clients = QueueClients(queue)
    for tenant in seconds:
        for _ in range(400):
            await clients.join(tenant)
    while clients.turns and sum(spent.values()) < 60:
        tenant = clients.turns[0][0]
        spent[tenant] += seconds[tenant]  # type: ignore[assignment]
        await clients.end(seconds[tenant])
    assert max(spent.values()) - min(spent.values()) < 2, spent
    queue.close()


@async_test
async def test_of_two_tenants_without_recent_work_the_smaller_job_goes_first() -> None:
    clients = QueueClients(_queue(workers=1))
    await clients.join("a", cost=100)
    await clients.join("large", cost=1000)
    await clients.join("small", cost=1)
    for _ in range(3):
        await clients.end(0.5)
    assert clients.order == ["a", "small", "large"]


@async_test
async def test_jobs_of_one_tenant_keep_their_order() -> None:
    queue, order = _queue(workers=1), []

    async def job(number: int, cost: int) -> None:
        with await queue.acquire(WorkAccount("a"), cost):
            order.append(number)

    await asyncio.gather(*(job(number, 100 - number) for number in range(20)))
    assert order == list(range(20))


@async_test
async def test_lone_tenant_may_fill_half_of_the_queue_and_always_leaves_space_for_another() -> None:
    queue = _queue(max_jobs=16)
    admissions = []

    def admit(tenant: str, size: int) -> None:
        admissions.append(queue.admitted(WorkAccount(tenant), size))
        admissions[-1].__enter__()

    for _ in range(8):
        admit("a", 1)
    with pytest.raises(Busy, match="try again in"):
        admit("a", 1)
    for tenant in "bcdefgh":
        admit(tenant, 1)
    assert admissions[0].__exit__(None, None, None) in (None, False)


def test_total_size_is_bounded_like_the_number_of_jobs_and_a_first_job_always_fits() -> None:
    queue = _queue()
    with queue.admitted(WorkAccount("a"), 500):
        with pytest.raises(Busy), queue.admitted(WorkAccount("a"), 1):
            pass
        with queue.admitted(WorkAccount("b"), 5000):
            pass
    with queue.admitted(WorkAccount("a"), 500):
        pass


@async_test
async def test_refusal_estimates_when_the_jobs_of_this_tenant_are_done() -> None:
    queue, account = _queue(workers=1), WorkAccount("a")
    # Of 3: 3 of 50 s for each 10.9, then 3 of 45 s for each 19.8. Of 500: never more than a minute.
    for seconds, size, wait in ((50.0, 3, 15), (0.0, 3, 8), (50.0, 500, 60)):
        (await queue.acquire(account, 10)).end(seconds)
        with (
            queue.admitted(account, size),
            pytest.raises(Busy, match=f"in {wait} s") as busy,
            queue.admitted(account, 1000),
        ):
            pass
        assert busy.value.retry_after == wait


@async_test
async def test_turn_is_charged_to_its_account_and_frees_its_worker_once() -> None:
    limiter = RateLimiter()
    tenant = Tenant(name="a", cache_namespace="a", limits=RateLimits(tokens_per_minute=10_000))
    reservation = limiter.reserve(tenant, 0, 0.0)
    queue = _queue(workers=1)
    turn = await queue.acquire(WorkAccount("a", reservation), 1)
    turn.end(2.05)
    turn.end(100)
    assert reservation.headers(0.0)["x-ratelimit-remaining-tokens"] in ("8000", "8001")
    reservation.charge_work(100, 0.0)
    assert reservation.headers(0.0)["x-ratelimit-remaining-tokens"] == "0"
    (await queue.acquire(WorkAccount("a", reservation), 1)).end()


@async_test
async def test_cancelled_job_uses_no_turn() -> None:
    rng = random.Random(0)
    clients = QueueClients(_queue(workers=2))
    for number in range(200):
        task = await clients.join(f"t{number % 3}")
        if rng.random() < 0.5:
            task.cancel()
        if clients.turns and rng.random() < 0.3:
            await clients.end(rng.random())
    while clients.turns:
        await clients.end()
    assert all(task.done() for task in clients.tasks)
    first, second = [await clients.queue.acquire(WorkAccount(name), 1) for name in "xy"]
    assert {first.worker, second.worker} == {0, 1}


@async_test
async def test_a_job_that_is_cancelled_after_its_grant_frees_the_worker_and_costs_nothing() -> None:
    """Between the grant and the next turn of the event loop."""
    clients = QueueClients(_queue(workers=1))
    await clients.join("a")
    cancelled = await clients.join("b")
    waiting = await clients.join("c")
    clients.turns.pop(0)[1].end(1.0)
    cancelled.cancel()
    await asyncio.wait([cancelled, waiting], timeout=5)
    assert cancelled.cancelled() and clients.order == ["a", "c"]
    assert clients.queue._tenants["b"] not in clients.queue._turns._accounts, "it has no debt"


@async_test
async def test_worker_pauses_in_proportion_to_its_turns() -> None:
    queue, loop = _queue(workers=1, max_busy_share=0.25), asyncio.get_running_loop()
    started_at = loop.time()
    for _ in range(3):
        (await queue.acquire(WorkAccount("a"), 1)).end(0.01)
    assert loop.time() - started_at > 2 * 0.03 * 0.9


@async_test
async def test_a_pause_ends_its_turn_by_itself() -> None:
    share = LoopShare()
    for _ in range(3):
        await asyncio.wait_for(share.pause(WorkAccount()), timeout=5)
