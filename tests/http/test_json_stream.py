"""JSON responses that are encoded while they are sent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.common.time_slice import TimeSlice
from app.http.json_stream import JsonStream, LazyArray


def _sent(numbers: int, *, disconnects: bool = False) -> tuple[list[dict[str, Any]], list[int]]:
    """The ASGI messages of a response, and for each call of close() how many of them were sent before it."""
    messages: list[dict[str, Any]] = []
    closed: list[int] = []

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)
        await asyncio.sleep(0)

    async def receive() -> dict[str, Any]:
        if not disconnects:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    batches = LazyArray(lambda: iter([list(range(numbers))] * 3))
    stream = JsonStream({"numbers": batches}, {}, TimeSlice(), lambda: closed.append(len(messages)))
    asyncio.run(stream({}, receive, send))  # type: ignore[arg-type]
    return messages, closed


@pytest.mark.parametrize("numbers", [3, 20_000])
def test_response_is_complete_and_closed_once(numbers: int) -> None:
    messages, closed = _sent(numbers)
    content = b"".join(message.get("body", b"") for message in messages)
    assert json.loads(content) == {"numbers": [*range(numbers)] * 3}
    assert not messages[-1]["more_body"]
    # A long response ends with an empty message: a client that has received it may send its next request.
    assert closed == [len(messages) if numbers == 3 else len(messages) - 1]


def test_response_with_a_disconnected_client_is_closed_once() -> None:
    messages, closed = _sent(20_000, disconnects=True)
    assert len(closed) == 1
    assert messages[-1].get("more_body")
