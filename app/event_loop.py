"""The event loop on which the service and its load run: uvloop's where it exists, asyncio's own elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvicorn

_T = TypeVar("_T")


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """asyncio.run() on that loop."""
    # uvicorn knows which one is installed; without log_config=None it would set its loggers up besides.
    new_loop = uvicorn.Config("", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(work)
