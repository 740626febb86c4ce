"""The real loop, scheduler and blocks around a model that hashes its tokens. No torch; a step takes STEP_MS.

`python -m tests.support.fake_engine STEP_MS FD`, started by fake_service.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from array import array
from collections.abc import Callable

from app.common.fault_injection import fault
from app.common.ipc import Ready, WorkerConfig
from app.common.model_version import Version
from app.common.types import Request, TokenScore
from app.engine.execution.engine import Engine
from app.engine.guided.grammar_workers import GrammarWorkers, Job
from app.engine.sampling.sampled_token import SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, StepResult
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from app.engine.worker_loop import BuiltEngine, run
from model.files import regular_file, sha256
from tests.support.removed_protections import is_armed

BLOCK_SIZE, CONTEXT = 16, 8192
_PRINTABLE = range(33, 256)
"""Tokens of the tiny tokenizer that decode to letters or parts of words."""


class FakeRunner:
    """Samples by a hash of weights, tokens and seed, independent of the rest of the batch."""

    def __init__(self, step_seconds: float, version: str) -> None:
        self._step_seconds = step_seconds
        self._version = version

    def run(self, plan: BatchPlan) -> StepResult:
        """Sleeps for the duration of a step, and samples."""
        fault("engine.forward", plan)
        time.sleep(self._step_seconds)
        drawn, scores = {}, {}
        for chunk in plan.chunks:
            request = chunk.sequence.request
            if chunk.samples:
                drawn[request.id] = (self._draw(request, chunk.sequence.tokens),)
            if positions := chunk.scores:
                count = request.prompt_logprobs or 0
                scores[request.id] = tuple(_score(request.prompt[position], count) for position in positions)
        return StepResult(drawn, scores)

    def _draw(self, request: Request, tokens: list[int]) -> SampledToken:
        drawing = f"{self._version}/{request.params.seed}/{request.params.choice}"
        seen = drawing.encode() + array("q", tokens)
        number = int.from_bytes(hashlib.blake2b(seen, digest_size=4).digest(), "big")
        token = _PRINTABLE[number % len(_PRINTABLE)]
        if is_armed("fake.not_finite", request):
            return SampledToken(None)
        count = request.params.logprobs
        return SampledToken(token) if count is None else SampledToken(token, *_score(token, count))


def _score(token: int, count: int) -> TokenScore:
    """Log-probabilities of a token and of `count` others."""
    others = range(_PRINTABLE.start, _PRINTABLE.start + count)
    return -1.0 - token / 512, tuple((other, -1.0 - other / 512) for other in others)


class NoGrammars:
    """A fake engine compiles no grammars: they need a model's vocabulary."""

    n_prepared = 0

    def __init__(self) -> None:
        self._workers = GrammarWorkers()

    def prepare(self, request: Request) -> Job:
        """Returns a job that only fails if a test has armed a fault."""
        job = Job(request.cache_namespace, lambda: fault("engine.guide", request), is_long=True)
        self._workers.submit(job)
        return job

    def forget(self, request_id: str) -> None:
        """Nothing to do."""

    def take_work(self) -> tuple[tuple[str, float], ...]:
        """No work to report."""
        return ()


def assemble(step_seconds: float) -> Callable[[WorkerConfig, Callable[[str], None]], BuiltEngine]:
    """The `build` function that the worker loop takes."""

    def assemble_fake(config: WorkerConfig, _announce: Callable[[str], None]) -> BuiltEngine:
        tokens_per_step = config.tokens_per_step or max(config.max_running, 256)  # as on a CPU
        limits = StepLimits(tokens_per_step=tokens_per_step, max_running=config.max_running)
        blocks = config.kv_blocks or config.max_running * CONTEXT // BLOCK_SIZE
        scheduler = Scheduler(limits, BlockPool(blocks, BLOCK_SIZE))
        fault("fake.load", config)
        ready = _ready(config, blocks)
        return BuiltEngine(Engine(scheduler, FakeRunner(step_seconds, ready.model_version.key)), NoGrammars(), ready)

    return assemble_fake


def _ready(config: WorkerConfig, blocks: int) -> Ready:
    weights = config.directory
    shape = json.loads(regular_file(weights / "config.json").read_bytes())
    return Ready(
        context=config.max_context or CONTEXT,
        vocab_size=shape["vocab_size"],
        n_params=0,
        dtype="none",
        device="none",
        model_version=Version(sha256(weights / "model.safetensors")),
        eos_ids=(),
        start_id=0,
        sampling_defaults={},
        blocks_total=blocks,
        block_size=BLOCK_SIZE,
        has_encoder=False,
        numerics="fake",
        numerics_reason="the engine is a fake one",
        waits_for_build=config.kernels == "auto" and config.library is None,
    )


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[2]), assemble(float(sys.argv[1]) / 1e3)))
