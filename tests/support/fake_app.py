"""The service's application in this process, around a fake engine whose steps take a millisecond."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from app.common.settings import Settings
from app.engine_client.replica import Replica
from app.main import create_app

_COMMAND = (sys.executable, "-P", "-m", "tests.support.fake_engine", "1")


@asynccontextmanager
async def running_app(weights: Path, **settings: Any) -> AsyncGenerator[FastAPI, None]:
    """Runs the application for the block; it is ready when the block begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Replica.__init__.__kwdefaults__, "command", _COMMAND)
        app = create_app(Settings(weights=weights, kernels="torch", **settings))
        async with app.router.lifespan_context(app):
            await app.state.service.wait_loaded()
            yield app
