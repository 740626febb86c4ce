"""Work that a disconnect cancels: its result is never lost, and nothing after it is cancelled."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from app.http.disconnect import until_disconnect
from tests.support.async_test import async_test


@pytest.mark.parametrize("disconnect_after", [1, 2, 3, 4, 5, 6, 99])
@pytest.mark.parametrize("turns", range(12))
@async_test
async def test_result_is_returned_whenever_client_or_caller_leave(turns: int, disconnect_after: int) -> None:
    made, got, rest = [], [], []

    async def work() -> str:
        for _ in range(3):
            await asyncio.sleep(0)
        made.append("it")
        return "it"

    async def receive() -> Message:
        for _ in range(disconnect_after):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def call() -> None:
        if what := await until_disconnect(work(), receive):
            got.append(what)
        for _ in range(3):
            await asyncio.sleep(0)
        rest.append("done")

    calling = asyncio.ensure_future(call())
    for _ in range(turns):
        await asyncio.sleep(0)
    if is_cancelled := turns < 7:
        calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)
    assert made == got
    assert is_cancelled or rest, "the disconnect cancelled code after the work"
    assert calling.cancelled() == (not rest)


@async_test
async def test_work_without_awaits_needs_no_task_and_no_message() -> None:
    async def work(error: Exception | None = None) -> str:
        if error:
            raise error
        return "it"

    async def receive() -> Message:
        pytest.fail("nothing may be received")

    assert await until_disconnect(work(), receive) == "it"
    with pytest.raises(ValueError, match="bug"):
        await until_disconnect(work(ValueError("bug")), receive)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


@async_test
async def test_work_receives_results_and_errors_of_its_awaits() -> None:
    async def work() -> list[object]:
        got: list[object] = []
        for wait in (asyncio.sleep(0, "a"), asyncio.wait_for(asyncio.Event().wait(), 0.001), asyncio.sleep(0, "b")):
            try:
                got.append(await wait)
            except TimeoutError:
                got.append("late")
        return got

    async def receive() -> Message:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    assert await until_disconnect(work(), receive) == ["a", "late", "b"]


@async_test
async def test_cancellation_of_the_caller_is_not_a_disconnect() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def call() -> None:
        await until_disconnect(asyncio.sleep(60), receive)
        pytest.fail("the caller was cancelled but continued")

    calling = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    calling.cancel()  # in the same turn of the event loop as the disconnect
    await asyncio.gather(calling, return_exceptions=True)
    assert calling.cancelled()


@async_test
async def test_disconnect_ends_the_work_and_leaves_no_pending_cancellation() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    assert await until_disconnect(asyncio.sleep(60, "it"), receive) is None
    task = asyncio.current_task()
    assert task and not task.cancelling()
