"""A step that the GPU has no memory for fails the one request that needs it: others go on as in a quiet run.

The allocator is held to what is taken already and a little more, and a prompt comes that needs far more than that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from app.common.types import BatchPlan
from app.engine.execution.engine import Engine
from benchmarks.gpu.drive import Texts, prompt_of, request, settle
from benchmarks.gpu.finding import Bench, Finding
from benchmarks.gpu.shapes import shape_of
from benchmarks.gpu.twins import device_engine
from model.config import ModelConfig

_SPARE_BYTES = 64 << 20
"""Enough for short texts; one matrix of what the prompt makes of its tokens takes more."""
_MOST_TOKENS = 64
"""Of a step, where want of memory is only pretended."""


def run(bench: Bench) -> Iterator[Finding]:
    """Neighbours without and with the prompt that does not fit; then the same prompt with memory again."""
    shape = shape_of("1b", tiny=bench.tiny)
    long = 100 if bench.tiny else 4000
    per_step = 128 if bench.tiny else 4096
    engine = device_engine(
        bench,
        shape,
        max_running=4,
        tokens_per_step=per_step,
        prompt_tokens_beside=per_step,
        cache_tokens=4 * shape.context,
    )
    quiet = _neighbours(engine, shape, bench.tiny, lambda: None)
    prompt = prompt_of(long, shape.vocab_size, "large")

    def disturb() -> None:
        engine.add(request("large", prompt, 2))

    with _scarce(engine, bench.device):
        noisy = _neighbours(engine, shape, bench.tiny, disturb)
    same = [noisy.tokens(name) == quiet.tokens(name) for name in quiet.events]
    yield Finding(what="neighbours", value=sum(same), unit=f"of {len(same)} untouched", ok=all(same))
    only = {*noisy.failed} == {"large"}
    yield Finding(what="failed", value=len(noisy.failed), unit="requests", ok=only, note=noisy.failed.get("large", ""))
    engine.add(request("again", prompt, 2))
    again = Texts()
    while engine.has_work:
        again.take(engine.step())
    went = len(again.tokens("again"))
    yield Finding(what="with memory again", value=went, unit="of 2 tokens", ok=went == 2, note=str(again.failed or ""))


def _neighbours(engine: Engine, shape: ModelConfig, tiny: bool, disturb: Callable[[], None]) -> Texts:
    """Three texts to their ends; in the middle of them something else happens."""
    texts = Texts()
    for row in range(3):
        engine.add(request(f"neighbour {row}", prompt_of(12, shape.vocab_size, row), 8 if tiny else 32))
    settle(engine, 3)
    disturb()
    while engine.has_work:
        texts.take(engine.step())
    return texts


@contextmanager
def _scarce(engine: Engine, device: str) -> Iterator[None]:
    """On a CPU, which has memory for all that is tiny, by pretending."""
    if device != "cuda":
        with _pretended(engine.runner):
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
def _pretended(runner: Any) -> Iterator[None]:
    """Whichever of both the engine asks: a step of many tokens finds no memory."""
    ways = [name for name in ("run", "launch") if hasattr(runner, name)]
    for name in ways:
        setattr(runner, name, partial(_unless_large, getattr(runner, name)))
    try:
        yield
    finally:
        for name in ways:
            delattr(runner, name)


def _unless_large(compute: Callable[[BatchPlan], Any], plan: BatchPlan) -> Any:
    if sum(chunk.stop - chunk.start for chunk in plan.chunks) > _MOST_TOKENS:
        raise torch.OutOfMemoryError("pretended")
    return compute(plan)
