"""Memory for request bodies that are arriving."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from app.common.errors import RateLimitExceeded
from app.http import incoming_bodies
from app.http.incoming_bodies import SMALL_BODY, IncomingBodies
from tests.support.async_test import async_test

_PART = 10 * SMALL_BODY


class _Body:
    """A body that reserves its memory and keeps it until it is released."""

    def __init__(self, bodies: IncomingBodies, tenant: str, size: int = _PART) -> None:
        self.is_reserved = False
        self._released = asyncio.Event()
        self.task = asyncio.create_task(self._hold(bodies, tenant, size))

    async def _hold(self, bodies: IncomingBodies, tenant: str, size: int) -> None:
        async with bodies.reserved(tenant, size):
            self.is_reserved = True
            await self._released.wait()
        self.is_reserved = False

    def let_go(self) -> None:
        self._released.set()

    async def release(self) -> None:
        self.let_go()
        await self.task


async def _held(bodies: list[_Body]) -> list[bool]:
    for _ in range(5):
        await asyncio.sleep(0)
    return [body.is_reserved for body in bodies]


@async_test
async def test_a_tenant_gets_as_much_as_is_free_and_then_waits_in_order_of_arrival() -> None:
    memory = IncomingBodies(60, 4 * _PART)
    bodies = [_Body(memory, "a") for _ in range(4)]
    assert await _held(bodies) == [True, True, False, False]
    await bodies[1].release()
    assert await _held(bodies) == [True, False, True, False]


@async_test
async def test_a_tenant_always_gets_one_body() -> None:
    memory = IncomingBodies(60, 4 * _PART)
    bodies = [_Body(memory, "a", 100 * _PART), _Body(memory, "b", 100 * _PART), _Body(memory, "b")]
    assert await _held(bodies) == [True, True, False]


@async_test
async def test_small_bodies_need_no_memory() -> None:
    memory = IncomingBodies(60, 2 * _PART)
    bodies = [_Body(memory, "a"), _Body(memory, "a"), _Body(memory, "a", SMALL_BODY)]
    assert await _held(bodies) == [True, False, True]


@async_test
async def test_a_body_that_leaves_lets_the_next_one_in() -> None:
    memory = IncomingBodies(60, 4 * _PART)
    bodies = [_Body(memory, "a"), _Body(memory, "a", 3 * _PART), _Body(memory, "a")]
    assert await _held(bodies) == [True, False, False]
    bodies[1].task.cancel()
    assert await _held(bodies) == [True, False, True]


@async_test
async def test_a_body_that_leaves_when_its_memory_is_granted_returns_it() -> None:
    memory = IncomingBodies(60, 2 * _PART)
    bodies = [_Body(memory, "a"), _Body(memory, "a"), _Body(memory, "a")]
    assert await _held(bodies) == [True, False, False]
    bodies[0]._released.set()
    await asyncio.sleep(0)
    bodies[1].task.cancel()
    assert await _held(bodies) == [False, False, True]


@async_test
async def test_a_body_that_leaves_while_memory_is_released_keeps_none() -> None:
    memory = IncomingBodies(60, 2 * _PART)
    bodies = [_Body(memory, "a", 2 * _PART), _Body(memory, "a", 2 * _PART)]
    assert await _held(bodies) == [True, False]
    bodies[0].let_go()
    bodies[1].task.cancel()  # the first task runs before it, and releases
    await asyncio.wait([body.task for body in bodies])
    assert bodies[0].task.exception() is None
    assert await _held([_Body(memory, "a", 2 * _PART)]) == [True]


@async_test
async def test_a_body_that_waits_too_long_is_refused() -> None:
    memory = IncomingBodies(0.01, 2 * _PART)
    holder, late = _Body(memory, "a"), _Body(memory, "a")
    with pytest.raises(RateLimitExceeded, match="still arriving"):
        await late.task
    await holder.release()
    assert await _held([_Body(memory, "a")]) == [True]


@async_test
async def test_a_tenant_with_too_many_waiting_bodies_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_bodies, "_MAX_WAITING", 2)
    memory = IncomingBodies(60, 2 * _PART)
    bodies = [_Body(memory, "a") for _ in range(4)]
    assert await _held(bodies) == [True, False, False, False]
    with pytest.raises(RateLimitExceeded):
        await bodies[3].task
    assert await _held([_Body(memory, "b")]) == [True]


@async_test
async def test_all_memory_is_free_again_when_all_bodies_are_released() -> None:
    memory = IncomingBodies(60, 4 * _PART)
    async with AsyncExitStack() as stack:
        for tenant in "ab":
            await stack.enter_async_context(memory.reserved(tenant, _PART))
    assert not memory._reserved and not memory._waiting


@async_test
async def test_memory_goes_to_the_tenant_that_was_granted_fewer_bytes() -> None:
    memory = IncomingBodies(60, 4 * _PART)
    holder = _Body(memory, "c", 2 * _PART)
    bodies = [_Body(memory, tenant) for tenant in ("a", "b", "a", "a", "b")]
    assert await _held([holder, *bodies]) == [True, True, True, False, False, False]
    await holder.release()
    assert await _held(bodies) == [True, True, True, False, False]
    await bodies[0].release()
    assert await _held(bodies) == [False, True, True, False, True], "a's next body came first, but a had a turn"
