"""A supervisor whose engine process cannot be run or never reports anything."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from app.common.ipc import WorkerConfig
from app.engine_client.engine_pool import EnginePool
from app.engine_client.replica import Replica
from app.engine_client.request_queue import RequestQueue
from app.engine_client.supervisor import EngineStopped
from tests.support.async_test import async_test


async def _stopped(*command: str) -> tuple[EngineStopped, int]:
    """The reason for giving up an engine of this command, and the number of restarts."""
    client = Replica(WorkerConfig(weights=""), silence_seconds=0.2, command=command)
    pool = EnginePool([client], RequestQueue(max_requests=1, max_prompt_tokens=1))
    pool.start()
    try:
        return await asyncio.wait_for(pool.wait_stopped(), 60), pool.restarts
    finally:
        await pool.stop()


@pytest.mark.parametrize(("mode", "why"), [(0o644, "Permission denied"), (None, "No such file or directory")])
@async_test
async def test_program_that_cannot_be_run_is_named_and_not_restarted(
    tmp_path: Path, mode: int | None, why: str
) -> None:
    """For example, a Python in another user's home directory while the service runs as its own user."""
    program = tmp_path / "python"
    if mode is not None:
        program.write_text("")
        program.chmod(mode)
    reason, restarts = await _stopped(str(program))
    assert (str(reason), reason.exit_code, restarts) == (f"{program}: cannot be run: {why}", 2, 0)


@async_test
async def test_silent_engine_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.engine_client.supervisor._STARTING_SILENCE", 0.5)
    reason, restarts = await _stopped(sys.executable, "-c", "import time; time.sleep(60)")
    assert (reason.exit_code, restarts) == (1, 3)
