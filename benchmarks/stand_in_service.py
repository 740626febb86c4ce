"""The service with a fake engine: `python -m benchmarks.stand_in_service WEIGHTS STEP_MS`, on any port."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from app.common import logs
from app.common.ipc import WorkerConfig
from app.common.settings import Settings
from app.engine_client.client import EngineClient
from app.engine_client.engine_pool import EnginePool
from app.engine_client.fair_queue import FairQueue, QueueLimits
from app.server import StartError, serve
from model.files import one_line


def main(weights: str, step_ms: str) -> int:
    """Runs until a signal; the exit code of the service."""

    settings: dict[str, Any] = {"weights": Path(weights), "port": 0}

    def stand_in(settings: Settings) -> EnginePool:
        command = (sys.executable, "-P", "-m", "benchmarks.stand_in", step_ms)
        limits = QueueLimits(max_requests=settings.max_waiting, max_prompt_tokens=settings.max_waiting_tokens)
        return EnginePool([EngineClient(WorkerConfig(weights=weights), FairQueue(limits), command=command)])

    try:
        return serve(Settings(**settings), stand_in)
    except StartError as error:
        logs.tell(one_line(f"error: {error}"))
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
