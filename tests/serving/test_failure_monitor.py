"""A service is unready only while its own canary request fails, after nothing but failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.serving.service import FailureMonitor


class World:
    """A monitor whose canary says what the test sets."""

    def __init__(self) -> None:
        self.canary: bool | None = False
        self.asked = 0
        self.monitor = FailureMonitor(self._ask, failures=3, recheck_seconds=0.01)

    async def _ask(self) -> bool | None:
        self.asked += 1
        return self.canary

    async def until(self, is_ready: bool) -> None:
        async with asyncio.timeout(30):
            while bool(self.monitor.problem) == is_ready:  # noqa: ASYNC110 (it has no event to wait for)
                await asyncio.sleep(0.001)


def _run(story: Callable[[World], Awaitable[None]]) -> None:
    async def told() -> None:
        world = World()
        task = asyncio.create_task(world.monitor.run())
        await story(world)
        task.cancel()

    asyncio.run(told())


async def _fail(world: World, times: int) -> None:
    for _ in range(times):
        world.monitor.record_failure()
    await asyncio.sleep(0.05)


def test_failures_in_a_row_that_the_canary_shares_make_it_unready_until_the_canary_succeeds() -> None:
    async def story(world: World) -> None:
        await _fail(world, 2)
        assert not world.asked and not world.monitor.problem
        await _fail(world, 1)
        await world.until(is_ready=False)
        world.canary = True
        await world.until(is_ready=True)

    _run(story)


def test_one_success_is_enough() -> None:
    async def story(world: World) -> None:
        await _fail(world, 2)
        world.monitor.record_success()
        await _fail(world, 2)
        assert not world.asked
        await _fail(world, 1)
        await world.until(is_ready=False)
        world.monitor.record_success()
        assert not world.monitor.problem

    _run(story)


@pytest.mark.parametrize("canary", [True, None])
def test_a_canary_that_does_not_fail_keeps_it_ready_and_is_not_asked_too_often(canary: bool | None) -> None:
    async def story(world: World) -> None:
        world.canary = canary
        for _ in range(100):
            world.monitor.record_failure()
        await asyncio.sleep(0.05)
        assert not world.monitor.problem and 1 <= world.asked <= 6

    _run(story)


def test_a_success_while_the_canary_runs_outweighs_it() -> None:
    async def story(world: World) -> None:
        async def ask() -> bool:
            world.monitor.record_success()
            return False

        world.monitor._canary = ask
        await _fail(world, 3)
        assert not world.monitor.problem

    _run(story)
