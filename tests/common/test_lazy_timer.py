"""A lazy timer fires when it is due or earlier, and not once it is cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest

from app.common.lazy_timer import LazyTimer
from tests.support.async_test import async_test


@pytest.mark.parametrize("dues", [(0.02,), (0.02, 30.0), (30.0, 0.02)])
@async_test
async def test_lazy_timer_set_to_later_fires_early_and_set_to_earlier_fires_earlier(dues: tuple[float, ...]) -> None:
    arrived = asyncio.Event()
    alarm = LazyTimer(arrived.set)
    for due in dues:
        alarm.set(time.monotonic() + due)
    await asyncio.wait_for(arrived.wait(), 20)


def test_cancelled_lazy_timer_does_not_fire() -> None:
    async def rung() -> bool:
        arrived = asyncio.Event()
        alarm = LazyTimer(arrived.set)
        alarm.set(time.monotonic())
        alarm.cancel()
        await asyncio.sleep(0.02)
        return arrived.is_set()

    assert not asyncio.run(rung())
