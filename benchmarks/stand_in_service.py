"""The service with a stand-in for its engine: `python -m benchmarks.stand_in_service WEIGHTS STEP_MS`, on any port."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from app import logs
from app.engine.admission import QueueLimits
from app.engine.client import EngineClient
from app.engine.fleet import Fleet
from app.engine.frames import WorkerConfig
from app.engine.waiting_line import WaitingLine
from app.server import StartError, serve
from app.settings import Settings
from model.files import one_line


def main(weights: str, step_ms: str) -> int:
    """Runs until a signal; the exit code of the service."""

    settings: dict[str, Any] = {"weights": Path(weights), "port": 0}

    def stand_in(settings: Settings) -> Fleet:
        command = (sys.executable, "-P", "-m", "benchmarks.stand_in", step_ms)
        limits = QueueLimits(max_requests=settings.max_waiting, max_prompt_tokens=settings.max_waiting_tokens)
        return Fleet([EngineClient(WorkerConfig(weights=weights), WaitingLine(limits), command=command)])

    try:
        return serve(Settings(**settings), stand_in)
    except StartError as error:
        logs.tell(one_line(f"error: {error}"))
    return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
