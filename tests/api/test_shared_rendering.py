"""The text of /metrics: rendered once for concurrent requests, never older than a request, within its share of time."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

from app.api.metrics import SharedRendering
from app.common.time_budget import TimeBudget
from tests.support.async_test import async_test


class _Text:
    """A text of two parts that takes `seconds` to render; counts its renderings."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.count = 0
        self.seconds = seconds
        self.begun = asyncio.Event()

    def __call__(self) -> Iterator[bytes]:
        self.begun.set()
        self.count += 1
        yield b"%d" % self.count
        time.sleep(self.seconds)
        yield b"."


def _rendering(text: _Text, share: float = 0.5, reserve: float = 10.0) -> SharedRendering:
    return SharedRendering(text, TimeBudget(share, reserve), asyncio.Lock())


@async_test
async def test_concurrent_requests_share_one_rendering() -> None:
    text = _Text()
    rendering = _rendering(text)
    assert await asyncio.gather(*(rendering.text() for _ in range(50))) == [b"1."] * 50
    assert await rendering.text() == b"2."


@async_test
async def test_request_during_a_rendering_gets_the_next_one() -> None:
    """The first is suspended between its parts, because they took longer than a slice."""
    text = _Text(0.003)
    rendering = _rendering(text)
    texts = [asyncio.ensure_future(rendering.text())]
    await asyncio.wait_for(text.begun.wait(), 5)
    texts.append(asyncio.ensure_future(rendering.text()))
    assert await asyncio.gather(*texts) == [b"1.", b"2."]


@async_test
async def test_flood_takes_no_more_than_its_share() -> None:
    text = _Text(0.01)
    rendering = _rendering(text, share=0.1, reserve=0.0)
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        await asyncio.gather(*(rendering.text() for _ in range(10)))
    assert text.count <= 2 + 0.1 * (time.monotonic() - began) / 0.01


@async_test
async def test_two_texts_share_a_budget() -> None:
    budget, turn = TimeBudget(0.1, 0.0), asyncio.Lock()
    texts = [_Text(0.01), _Text(0.01)]
    renderings = [SharedRendering(text, budget, turn) for text in texts]
    began = time.monotonic()
    while time.monotonic() < began + 0.5:
        await asyncio.gather(*(rendering.text() for rendering in renderings))
    assert sum(text.count for text in texts) <= 3 + 0.1 * (time.monotonic() - began) / 0.01


@async_test
async def test_request_that_is_cancelled_leaves_the_text_to_others() -> None:
    rendering = _rendering(_Text())
    leaves, stays = (asyncio.ensure_future(rendering.text()) for _ in range(2))
    await asyncio.sleep(0)
    leaves.cancel()
    assert await stays == b"1."


@async_test
async def test_failed_rendering_reaches_its_requests_and_not_later_ones() -> None:
    attempts = itertools.count()

    def fails_once() -> Iterator[bytes]:
        if not next(attempts):
            raise RuntimeError("a collector")
        yield b"text"

    rendering = SharedRendering(fails_once, TimeBudget(0.5, 10.0), asyncio.Lock())
    results = await asyncio.gather(rendering.text(), rendering.text(), return_exceptions=True)
    assert [str(result) for result in results] == ["a collector"] * 2
    assert await rendering.text() == b"text"
