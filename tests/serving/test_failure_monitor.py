"""A service is unready only while its own canary request fails, after nothing but failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.serving import failure_monitor
from app.serving.failure_monitor import FAILURES, FailureMonitor
from tests.support.async_test import async_test


class MonitorHarness:
    """A monitor whose canary returns what the test sets."""

    def __init__(self) -> None:
        self.canary: bool | None = False
        self.canary_runs = 0
        self.monitor = FailureMonitor(self._run_canary)

    async def _run_canary(self) -> bool | None:
        self.canary_runs += 1
        return self.canary

    async def until(self, is_ready: bool) -> None:
        async with asyncio.timeout(30):
            while bool(self.monitor.problem) == is_ready:  # noqa: ASYNC110 (it has no event to wait for)
                await asyncio.sleep(0.001)


@asynccontextmanager
async def _running() -> AsyncIterator[MonitorHarness]:
    harness = MonitorHarness()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failure_monitor, "RECHECK_SECONDS", 0.01)
        task = asyncio.create_task(harness.monitor.run())
        yield harness
        task.cancel()


async def _fail(harness: MonitorHarness, times: int) -> None:
    for _ in range(times):
        harness.monitor.record_failure()
    await asyncio.sleep(0.05)


@async_test
async def test_consecutive_failures_with_a_failing_canary_make_the_service_unready_until_it_succeeds() -> None:
    async with _running() as harness:
        await _fail(harness, FAILURES - 1)
        assert not harness.canary_runs and not harness.monitor.problem
        await _fail(harness, 1)
        await harness.until(is_ready=False)
        harness.canary = True
        await harness.until(is_ready=True)


@async_test
async def test_one_success_keeps_the_service_ready() -> None:
    async with _running() as harness:
        await _fail(harness, FAILURES - 1)
        harness.monitor.record_success()
        await _fail(harness, FAILURES - 1)
        assert not harness.canary_runs
        await _fail(harness, 1)
        await harness.until(is_ready=False)
        harness.monitor.record_success()
        assert not harness.monitor.problem


@pytest.mark.parametrize("canary", [True, None])
@async_test
async def test_succeeding_canary_keeps_the_service_ready_and_runs_rarely(canary: bool | None) -> None:
    async with _running() as harness:
        harness.canary = canary
        for _ in range(100):
            harness.monitor.record_failure()
        await asyncio.sleep(0.05)
        assert not harness.monitor.problem and 1 <= harness.canary_runs <= 6


@async_test
async def test_success_during_a_failing_canary_keeps_the_service_ready() -> None:
    async with _running() as harness:

        async def succeed_meanwhile() -> bool:
            harness.monitor.record_success()
            return False

        harness.monitor._canary = succeed_meanwhile
        await _fail(harness, FAILURES)
        assert not harness.monitor.problem
