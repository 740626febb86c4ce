"""Emulates a GPU engine on a CPU: reference kernels, steps in flight, captures that only record.

So the whole of the check can be tried where there is no GPU: the same rows, steps and graphs, none of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from app.engine.execution.engine import Engine
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.kernels.reference_operations import ReferenceKernels
from app.engine.gpu.setup import RunnerConfig, device_runner
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from benchmarks.gpu.engines import engine_of
from benchmarks.gpu.finding import Bench
from benchmarks.gpu.shapes import reader
from model.checkpoint.checkpoint import Checkpoint
from model.config import ModelConfig

_BLOCK = 16


def device_engine(
    bench: Bench, shape: ModelConfig, read: Callable[..., Checkpoint] | None = None, **knobs: Any
) -> Engine:
    """On a GPU the result of engine_of(); on a CPU its emulation, which has fewer options."""
    if bench.device == "cuda":
        return engine_of(bench, shape, read, **knobs)
    return _twin(shape, read or reader(shape), bench, **knobs)


def _twin(
    shape: ModelConfig,
    read: Callable[..., Checkpoint],
    bench: Bench,
    *,
    max_running: int,
    cache_tokens: int,
    tokens_per_step: int = 256,
    prompt_tokens_beside: int | None = None,
    dtype: str = "float32",
) -> Engine:
    decoder = read(bench.folder, device=torch.device("cpu"), dtype=getattr(torch, dtype)).decoder
    blocks, kernels = -(-cache_tokens // _BLOCK), ReferenceKernels()
    wishes = RunnerConfig(
        max_running=max_running, tokens_per_step=tokens_per_step, context=shape.context, block_size=_BLOCK
    )
    runner = device_runner(PagedDecoder(decoder, kernels), kernels, wishes, blocks=blocks)
    runner.warm_up(tokens_per_step)
    runner.capture(lambda work: work)
    limits = StepLimits(
        tokens_per_step=tokens_per_step, max_running=max_running, prompt_tokens_beside=prompt_tokens_beside
    )
    return Engine(Scheduler(limits, BlockPool(blocks, _BLOCK)), runner, runner)
