"""Fault isolation: a step that runs out of GPU memory fails only the request that needs it; others are unaffected.

Limits the allocator to what it holds and a little more, then adds a prompt that needs far more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from app.common.types import BatchPlan
from app.engine.execution.engine import Engine
from benchmarks.engine_driver import Outputs, random_prompt, request, run_until_decoding
from benchmarks.gpu.engines import build_device_engine
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.gpu.shapes import shape_of
from model.config import ModelConfig

_SPARE_BYTES = 64 << 20
"""Enough for short sequences; one matrix of the prompt's activations takes more."""
_MOST_TOKENS = 64
"""Tokens of a step above which the CPU emulation simulates running out of memory."""


def run(context: StageContext) -> Iterator[Finding]:
    """Runs neighbors without and with the large prompt; then the same prompt with enough memory."""
    shape = shape_of("1b", tiny=context.tiny)
    long = 100 if context.tiny else 4000
    per_step = 128 if context.tiny else 4096
    engine = build_device_engine(
        context,
        shape,
        max_running=4,
        tokens_per_step=per_step,
        prompt_tokens_beside=per_step,
        cache_tokens=4 * shape.context,
    )
    undisturbed = _run_neighbors(engine, shape, context.tiny, lambda: None)
    prompt = random_prompt(long, shape.vocab_size, "large")

    def add_large_request() -> None:
        engine.add(request("large", prompt, 2))

    with _limited_memory(engine, context.device):
        disturbed = _run_neighbors(engine, shape, context.tiny, add_large_request)
    same = [disturbed.tokens(name) == undisturbed.tokens(name) for name in undisturbed.events]
    yield Finding(what="neighbours", value=sum(same), unit=f"of {len(same)} untouched", ok=all(same))
    is_isolated = {*disturbed.failed} == {"large"}
    yield Finding(
        what="failed",
        value=len(disturbed.failed),
        unit="requests",
        ok=is_isolated,
        note=disturbed.failed.get("large", ""),
    )
    engine.add(request("again", prompt, 2))
    again = Outputs()
    while engine.has_work:
        again.take(engine.step())
    n_tokens = len(again.tokens("again"))
    yield Finding(
        what="with memory again", value=n_tokens, unit="of 2 tokens", ok=n_tokens == 2, note=str(again.failed or "")
    )


def _run_neighbors(engine: Engine, shape: ModelConfig, tiny: bool, add_large_request: Callable[[], None]) -> Outputs:
    """Runs three requests to their end; calls `add_large_request` in the middle of them."""
    outputs = Outputs()
    for row in range(3):
        engine.add(request(f"neighbour {row}", random_prompt(12, shape.vocab_size, row), 8 if tiny else 32))
    run_until_decoding(engine, 3)
    add_large_request()
    while engine.has_work:
        outputs.take(engine.step())
    return outputs


@contextmanager
def _limited_memory(engine: Engine, device: str) -> Iterator[None]:
    """Limits the memory; simulated on a CPU, where tiny sizes always fit."""
    if device != "cuda":
        with _simulated_limit(engine.runner):
            yield
        return
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _SPARE_BYTES) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def _simulated_limit(runner: Any) -> Iterator[None]:
    """Makes steps of many tokens fail, in whichever method the engine calls."""
    methods = [name for name in ("run", "launch") if hasattr(runner, name)]
    for name in methods:
        setattr(runner, name, partial(_fail_if_large, getattr(runner, name)))
    try:
        yield
    finally:
        for name in methods:
            delattr(runner, name)


def _fail_if_large(compute: Callable[[BatchPlan], Any], plan: BatchPlan) -> Any:
    if sum(chunk.stop - chunk.start for chunk in plan.chunks) > _MOST_TOKENS:
        raise torch.OutOfMemoryError("pretended")
    return compute(plan)
