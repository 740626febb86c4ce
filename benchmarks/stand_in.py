"""A fake engine process without a model: answers every request with its own prompt, repeated. No torch.

`python -m benchmarks.stand_in STEP_MS FD`, started by benchmarks.stand_in_service. A step gives every open request one
token, all in one StepReport, and takes STEP_MS; with 0 the pipe sets the pace. Guides, scores and caches are not its
business.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from app.common.ipc import Cancel, FrameReceiver, Ready, Submit, WorkerConfig, encode_frame
from app.common.types import Counters, FinishReason, Request, RequestStarted, SampledEvent, StepReport


@dataclass(slots=True)
class _Open:
    request: Request
    n_tokens: int = 0

    def next(self) -> SampledEvent:
        index, prompt = self.n_tokens, self.request.prompt
        self.n_tokens += 1
        finish = FinishReason.LENGTH if self.n_tokens >= self.request.max_tokens else None
        logprob = None if self.request.params.logprobs is None else -1.0
        return SampledEvent(self.request.id, index, prompt[index % len(prompt)], logprob, (), finish)


def main(step_seconds: float, descriptor: int) -> int:
    """Runs until the pipe closes."""
    pipe = socket.socket(fileno=descriptor)
    inbox = FrameReceiver(pipe)
    (config,) = inbox.receive(60.0)
    assert isinstance(config, WorkerConfig), "the first frame tells the configuration"
    try:
        pipe.sendall(encode_frame(_ready(Path(config.weights))))
        _serve(pipe, inbox, step_seconds, config.heartbeat_seconds)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0


def _serve(pipe: socket.socket, inbox: FrameReceiver, step_seconds: float, heartbeat_seconds: float) -> NoReturn:
    open_requests: dict[str, _Open] = {}
    due = time.monotonic()
    while True:
        begun: list[RequestStarted] = []
        for frame in inbox.receive(0.0 if open_requests else heartbeat_seconds):
            if isinstance(frame, Submit):
                open_requests[frame.request.id] = _Open(frame.request)
                begun.append(RequestStarted(frame.request.id, 0))
            elif isinstance(frame, Cancel):
                open_requests.pop(frame.request_id, None)
        if begun:
            pipe.sendall(encode_frame(_report((), tuple(begun), len(open_requests))))
        # A step that is late is not made up for: the next one takes its time all the same.
        due = max(due, time.monotonic()) + (step_seconds if open_requests else 0.0)
        time.sleep(max(0.0, due - time.monotonic()))
        events = tuple(one.next() for one in open_requests.values())
        for event in events:
            if event.finish:
                del open_requests[event.request_id]
        pipe.sendall(encode_frame(_report(events, (), len(open_requests))))


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
        numerics_reason="a stand-in computes nothing",
        waits_for_build=False,
    )


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) / 1e3, int(sys.argv[2])))
