"""A service is unready only while its own canary request fails, after nothing but failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.serving.service import FailureMonitor


class MonitorHarness:
    """A monitor whose canary returns what the test sets."""

    def __init__(self) -> None:
        self.canary: bool | None = False
        self.canary_runs = 0
        self.monitor = FailureMonitor(self._run_canary, failures=3, recheck_seconds=0.01)

    async def _run_canary(self) -> bool | None:
        self.canary_runs += 1
        return self.canary

    async def until(self, is_ready: bool) -> None:
        async with asyncio.timeout(30):
            while bool(self.monitor.problem) == is_ready:  # noqa: ASYNC110 (it has no event to wait for)
                await asyncio.sleep(0.001)


def _run(scenario: Callable[[MonitorHarness], Awaitable[None]]) -> None:
    async def main() -> None:
        harness = MonitorHarness()
        task = asyncio.create_task(harness.monitor.run())
        await scenario(harness)
        task.cancel()

    asyncio.run(main())


async def _fail(harness: MonitorHarness, times: int) -> None:
    for _ in range(times):
        harness.monitor.record_failure()
    await asyncio.sleep(0.05)


def test_failures_in_a_row_that_the_canary_shares_make_it_unready_until_the_canary_succeeds() -> None:
    async def scenario(harness: MonitorHarness) -> None:
        await _fail(harness, 2)
        assert not harness.canary_runs and not harness.monitor.problem
        await _fail(harness, 1)
        await harness.until(is_ready=False)
        harness.canary = True
        await harness.until(is_ready=True)

    _run(scenario)


def test_one_success_is_enough() -> None:
    async def scenario(harness: MonitorHarness) -> None:
        await _fail(harness, 2)
        harness.monitor.record_success()
        await _fail(harness, 2)
        assert not harness.canary_runs
        await _fail(harness, 1)
        await harness.until(is_ready=False)
        harness.monitor.record_success()
        assert not harness.monitor.problem

    _run(scenario)


@pytest.mark.parametrize("canary", [True, None])
def test_a_canary_that_does_not_fail_keeps_it_ready_and_is_not_asked_too_often(canary: bool | None) -> None:
    async def scenario(harness: MonitorHarness) -> None:
        harness.canary = canary
        for _ in range(100):
            harness.monitor.record_failure()
        await asyncio.sleep(0.05)
        assert not harness.monitor.problem and 1 <= harness.canary_runs <= 6

    _run(scenario)


def test_a_success_while_the_canary_runs_outweighs_it() -> None:
    async def scenario(harness: MonitorHarness) -> None:
        async def succeed_meanwhile() -> bool:
            harness.monitor.record_success()
            return False

        harness.monitor._canary = succeed_meanwhile
        await _fail(harness, 3)
        assert not harness.monitor.problem

    _run(scenario)
