"""A supervisor whose engine process can never be run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from app.common.ipc import WorkerConfig
from app.engine_client.supervisor import EngineStopped, Supervisor


class _Listener:
    def __init__(self) -> None:
        self.stopped: asyncio.Future[EngineStopped] = asyncio.get_running_loop().create_future()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is only for an engine that was run")

    def on_stopped(self, reason: EngineStopped) -> None:
        self.stopped.set_result(reason)

    def on_crash(self) -> bool:
        return False


@pytest.mark.parametrize(("mode", "why"), [(0o644, "Permission denied"), (None, "No such file or directory")])
def test_a_program_that_cannot_be_run_is_named_and_not_tried_again(tmp_path: Path, mode: int | None, why: str) -> None:
    """Such as a Python below the home directory of another user, where the service runs as a user of its own."""
    program = tmp_path / "python"
    if mode is not None:
        program.write_text("")
        program.chmod(mode)

    async def start() -> tuple[EngineStopped, int]:
        listener: Any = _Listener()
        supervisor = Supervisor(WorkerConfig(weights=""), listener, silence_seconds=5, command=[str(program)])
        supervisor.start()
        reason = await asyncio.wait_for(listener.stopped, 30)
        await supervisor.stop()
        return reason, supervisor.restarts

    reason, restarts = asyncio.run(start())
    assert (str(reason), reason.exit_code) == (f"{program}: cannot be run: {why}", 2)
    assert restarts == 0
