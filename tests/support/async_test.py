"""A decorator for tests that are coroutines."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

_P = ParamSpec("_P")


def async_test(test: Callable[_P, Awaitable[None]]) -> Callable[_P, None]:
    """Runs the test in its own event loop."""

    @functools.wraps(test)
    def run(*arguments: _P.args, **fixtures: _P.kwargs) -> None:
        async def call() -> None:
            await test(*arguments, **fixtures)

        asyncio.run(call())

    return run
