"""FE: the real loop, scheduler and blocks around a model that is a hash of its tokens. No torch; a step takes STEP_MS.

`python fake_engine.py STEP_MS FD`, started by fake_service.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from app.engine.blocks import BlockPool
from app.engine.engine import Engine
from app.engine.frames import Ready, WorkerConfig
from app.engine.limits import SchedulerLimits
from app.engine.loop import run
from app.engine.result import Drawn, StepResult
from app.engine.scheduler import Scheduler
from app.engine.start import Assembled
from app.engine.types import BatchPlan, Request
from app.faults import fault, is_armed

BLOCK_SIZE, CONTEXT = 16, 8192
_PRINTABLE = range(33, 256)
"""Tokens of the tiny tokenizer that are letters or parts of words: what is drawn is text."""
_TOP = tuple((token, -0.5 - place) for place, token in enumerate(_PRINTABLE[:20]))
"""The most likely tokens, whatever was read."""


class FakeRunner:
    """Draws by a hash of weights, tokens and seed: deterministic whatever else is in the batch."""

    def __init__(self, step_seconds: float, version: str) -> None:
        self._step_seconds = step_seconds
        self._version = version

    def run(self, plan: BatchPlan) -> StepResult:
        """Takes as long as a step takes."""
        time.sleep(self._step_seconds)
        drawn = {}
        for chunk in plan.chunks:
            if chunk.samples:
                request = chunk.sequence.request
                drawing = f"{self._version}/{request.params.seed}/{request.params.choice}"
                seen = drawing.encode() + array("q", chunk.sequence.tokens)
                number = int.from_bytes(hashlib.blake2b(seen, digest_size=4).digest(), "big")
                spoilt = is_armed("fake.not_finite", request)
                asked = request.params.logprobs
                logprob, top = (None, ()) if asked is None else (-0.5, _TOP[:asked])
                drawn[request.id] = Drawn(None if spoilt else _PRINTABLE[number % len(_PRINTABLE)], logprob, top)
        return StepResult(drawn, {})


class NoGuides:
    """Guides need a model's vocabulary."""

    n_prepared = 0

    def prepare(self, request: Request) -> None:
        """Nothing to do."""

    def forget(self, request_id: str) -> None:
        """Nothing to do."""


def assemble(step_seconds: float) -> Callable[[WorkerConfig, Callable[[str], None]], Assembled]:
    """An assembly as the loop asks for it."""

    def assemble_fake(config: WorkerConfig, _announce: Callable[[str], None]) -> Assembled:
        limits = SchedulerLimits(tokens_per_step=config.tokens_per_step, max_running=config.max_running)
        blocks = config.kv_blocks or config.max_running * CONTEXT // BLOCK_SIZE
        scheduler = Scheduler(limits, BlockPool(blocks, BLOCK_SIZE))
        fault("fake.load")
        ready = _ready(config, blocks)
        return Assembled(Engine(scheduler, FakeRunner(step_seconds, ready.weights_version)), NoGuides(), ready)

    return assemble_fake


def _ready(config: WorkerConfig, blocks: int) -> Ready:
    shape = json.loads((Path(config.weights) / "config.json").read_bytes())
    return Ready(
        context=config.max_context or CONTEXT,
        vocab_size=shape["vocab_size"],
        n_params=0,
        dtype="none",
        device="none",
        weights_version=hashlib.sha256((Path(config.weights) / "model.safetensors").read_bytes()).hexdigest(),
        eos_ids=(),
        start_id=0,
        sampling_defaults={},
        blocks_total=blocks,
        block_size=BLOCK_SIZE,
        has_encoder=False,
        numerics="fake",
        numerics_reason="the engine is a fake one",
        waits_for_build=False,
    )


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[2]), assemble(float(sys.argv[1]) / 1e3)))
