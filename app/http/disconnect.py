"""Work that a disconnect of the client cancels."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any, TypeVar

from starlette.types import Receive

_T = TypeVar("_T")


async def until_disconnect(work: Coroutine[Any, Any, _T], receive: Receive) -> _T | None:
    """Runs `work` in this task; if the client disconnects first, cancels it and returns None.

    No result is lost: `work` either returns one, which is returned, or is cancelled while it waits. Work that never
    waits, like the work of nearly all requests before they are queued, needs no task that watches the client.
    """
    try:
        awaited = work.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    task = asyncio.current_task()
    assert task
    n_cancellations = task.cancelling()
    is_working, is_cancelled = True, False

    def cancel_work(watching: asyncio.Task[None]) -> None:
        nonlocal is_cancelled
        if not watching.cancelled():
            watching.exception()  # a client whose receive() fails is gone, too
        if is_working:  # otherwise this would cancel what the task awaits next
            is_cancelled = True
            task.cancel()

    watching = asyncio.ensure_future(_wait_for_disconnect(receive))
    watching.add_done_callback(cancel_work)
    try:
        return await _resume(work, awaited)
    except asyncio.CancelledError:
        if is_cancelled and task.cancelling() == n_cancellations + 1:  # only cancel_work() has cancelled the task
            return None
        raise
    finally:
        is_working = False
        watching.cancel()
        if is_cancelled:
            task.uncancel()


@coroutine
def _resume(work: Coroutine[Any, Any, _T], awaited: Any) -> Generator[Any, Any, _T]:
    """Awaits a coroutine that has begun and waits for `awaited`; like `yield from`, which would begin it (PEP 380)."""
    try:
        while True:
            try:
                sent = yield awaited
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                awaited = work.throw(error)
            else:
                awaited = work.send(sent)
    except StopIteration as end:
        result: _T = end.value
        return result


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
