"""Turns for work that no API key pays for."""

from __future__ import annotations

import asyncio

import pytest

from app.http import best_effort
from app.http.best_effort import BestEffortTurns
from tests.support.async_test import async_test


async def _worked(turns: BestEffortTurns, addresses: list[str], seconds: float, cost: float) -> list[str]:
    """The addresses in the order of their turns; each asks for another one at once, and each turn costs `cost`."""
    order: list[str] = []

    def work(address: str) -> None:
        order.append(address)
        turns.charge(cost)
        turns.request(address, lambda: work(address))

    for address in addresses:
        turns.request(address, lambda address=address: work(address))  # type: ignore[misc]
    await asyncio.sleep(seconds)
    return order


@async_test
async def test_work_gets_its_share_while_a_tenants_request_runs() -> None:
    turns = BestEffortTurns(share=0.1)
    with turns.paying():
        order = await _worked(turns, ["a"], seconds=0.5, cost=0.01)
    assert 2 <= len(order) <= 9, "0.05 s and a burst, in turns of 0.01 s"


@async_test
async def test_work_is_not_limited_while_no_request_of_a_tenant_runs() -> None:
    order = await _worked(BestEffortTurns(share=0.1), ["a"], seconds=0.3, cost=0.01)
    assert len(order) > 50


@async_test
async def test_addresses_take_turns() -> None:
    turns = BestEffortTurns()
    with turns.paying():
        order = await _worked(turns, ["a", "a", "a", "b"], seconds=0.3, cost=0.001)
    assert order[:6] == ["a", "b", "a", "b", "a", "b"]


@async_test
async def test_a_turn_is_immediate_while_there_is_credit_and_waits_afterwards() -> None:
    turns = BestEffortTurns()
    with turns.paying():
        await asyncio.wait_for(turns.turn("a", 0.001), 0.01)
        turns.charge(1.0)
        assert turns.is_exhausted
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(turns.turn("a"), 0.05)
    await asyncio.wait_for(turns.turn("a"), 1.0)  # no tenant's request runs any more


@async_test
async def test_cancelled_work_gets_no_turn_and_delays_no_other() -> None:
    turns, called = BestEffortTurns(), list[str]()
    first, second = (lambda: called.append("first")), (lambda: called.append("second"))
    turns.request("a", first)
    turns.request("a", second)
    turns.cancel("a", first)
    turns.cancel("b", first)
    await asyncio.sleep(0.02)
    assert called == ["second"] and not turns.is_exhausted


@async_test
async def test_input_that_waits_takes_bounded_memory_and_leaves_some_to_other_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best_effort, "_MAX_BYTES", 100)
    turns, callbacks = BestEffortTurns(), [lambda index=index: index for index in range(5)]
    with turns.paying():
        turns.charge(1.0)
        assert turns.has_memory("a", 100) and not turns.has_memory("a", 101)
        for callback in callbacks:
            turns.request("a", callback, size=10)
        assert not turns.has_memory("a", 10) and turns.has_memory("b", 50)
        for callback in callbacks:
            turns.cancel("a", callback)
        assert turns.has_memory("a", 100) and not turns._waiting and not turns._bytes


@async_test
async def test_a_large_debt_is_forgiven() -> None:
    turns = BestEffortTurns()
    with turns.paying():
        turns.charge(100.0)
        await asyncio.wait_for(turns.turn("a"), 2.0)
