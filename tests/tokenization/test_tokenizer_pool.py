"""Long texts wait for a turn of a tokenizer thread, short ones are tokenized at once."""

from __future__ import annotations

import asyncio

from app.access.worker_turns import WorkAccount
from app.tokenization.tokenizer_pool import TokenizerPool
from tests.support.async_test import async_test


@async_test
async def test_long_texts_wait_for_a_turn_and_short_ones_do_not() -> None:
    done: list[str] = []
    texts = TokenizerPool()
    long_ones = [
        asyncio.create_task(texts.run(10**6, lambda name=name: done.append(name), WorkAccount())) for name in "ab"
    ]
    await texts.run(10, lambda: done.append("short"), WorkAccount())
    assert done == ["short"]
    await asyncio.gather(*long_ones)
    texts.close()
    assert done == ["short", "a", "b"]
