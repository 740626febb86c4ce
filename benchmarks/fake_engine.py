"""The service with a fake engine that has no model: `python -m benchmarks.fake_engine WEIGHTS STEP_MS`, on a free port.

The engine process (`... --engine STEP_MS FD`, started by the service) answers every request with its own prompt,
repeated. A step gives each running request one token, all in one StepReport, and takes STEP_MS; with 0 the speed of the
pipe limits it. It ignores grammars, prompt log-probabilities and the prefix cache, and imports no torch.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from app.common import logs
from app.common.ipc import Cancel, FrameReceiver, Ready, Submit, WorkerConfig, encode_frame
from app.common.settings import Settings
from app.common.types import Counters, FinishReason, Request, RequestStarted, SampledEvent, StepReport
from app.engine_client.client import EngineClient
from app.engine_client.engine_pool import EnginePool
from app.engine_client.fair_queue import FairQueue, QueueLimits
from app.server import StartError, serve
from model.files import one_line

_ENGINE = "--engine"


@dataclass(slots=True)
class _RunningRequest:
    request: Request
    n_tokens: int = 0

    def next_event(self) -> SampledEvent:
        index, prompt = self.n_tokens, self.request.prompt
        self.n_tokens += 1
        finish = FinishReason.LENGTH if self.n_tokens >= self.request.max_tokens else None
        logprob = None if self.request.params.logprobs is None else -1.0
        return SampledEvent(self.request.id, index, prompt[index % len(prompt)], logprob, (), finish)


def main(arguments: list[str]) -> int:
    """Runs the engine process with --engine, else the service."""
    if arguments[0] == _ENGINE:
        return _run_engine(float(arguments[1]) / 1e3, int(arguments[2]))
    return _run_service(*arguments)


def _run_service(weights: str, step_ms: str) -> int:
    """Runs until a signal; returns the exit code of the service."""
    settings: dict[str, Any] = {"weights": Path(weights), "port": 0}

    def fake_pool(settings: Settings) -> EnginePool:
        command = (sys.executable, "-P", "-m", "benchmarks.fake_engine", _ENGINE, step_ms)
        limits = QueueLimits(max_requests=settings.max_waiting, max_prompt_tokens=settings.max_waiting_tokens)
        return EnginePool([EngineClient(WorkerConfig(weights=weights), command=command)], FairQueue(limits))

    try:
        return serve(Settings(**settings), fake_pool)
    except StartError as error:
        logs.write_line(one_line(f"error: {error}"))
    return 2


def _run_engine(step_seconds: float, descriptor: int) -> int:
    """Runs until the pipe closes."""
    pipe = socket.socket(fileno=descriptor)
    receiver = FrameReceiver(pipe)
    (config,) = receiver.receive(60.0)
    assert isinstance(config, WorkerConfig), "the first frame is the configuration"
    try:
        pipe.sendall(encode_frame(_ready(Path(config.weights))))
        _step_forever(pipe, receiver, step_seconds, config.heartbeat_seconds)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0


def _step_forever(
    pipe: socket.socket, receiver: FrameReceiver, step_seconds: float, heartbeat_seconds: float
) -> NoReturn:
    running: dict[str, _RunningRequest] = {}
    due = time.monotonic()
    while True:
        started: list[RequestStarted] = []
        for frame in receiver.receive(0.0 if running else heartbeat_seconds):
            if isinstance(frame, Submit):
                running[frame.request.id] = _RunningRequest(frame.request)
                started.append(RequestStarted(frame.request.id, 0))
            elif isinstance(frame, Cancel):
                running.pop(frame.request_id, None)
        if started:
            pipe.sendall(encode_frame(_report((), tuple(started), len(running))))
        # A late step is not made up for: the next one takes its full time.
        due = max(due, time.monotonic()) + (step_seconds if running else 0.0)
        time.sleep(max(0.0, due - time.monotonic()))
        events = tuple(request.next_event() for request in running.values())
        for event in events:
            if event.finish:
                del running[event.request_id]
        pipe.sendall(encode_frame(_report(events, (), len(running))))


def _report(events: tuple[SampledEvent, ...], started: tuple[RequestStarted, ...], running: int) -> StepReport:
    return StepReport(events=events, started=started, counters=Counters(running=running), at=time.monotonic())


def _ready(weights: Path) -> Ready:
    shape = json.loads((weights / "config.json").read_bytes())
    return Ready(
        context=1 << 20,
        vocab_size=shape["vocab_size"],
        n_params=0,
        dtype="none",
        device="none",
        weights_version="0" * 64,
        eos_ids=(),
        start_id=0,
        sampling_defaults={},
        blocks_total=1,
        block_size=16,
        has_encoder=False,
        numerics="none",
        numerics_reason="a fake engine computes nothing",
        waits_for_build=False,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
