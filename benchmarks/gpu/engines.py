"""Engines as a service would build them, and the emulation of a GPU engine on a CPU."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from app.common.ipc import WorkerConfig
from app.engine import startup
from app.engine.execution.engine import Engine
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.kernels.reference_operations import ReferenceKernels
from app.engine.gpu.runner import DeviceRunner
from app.engine.gpu.setup import RunnerConfig, device_runner
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from benchmarks.gpu.results import StageContext
from benchmarks.gpu.shapes import checkpoint_reader
from model.checkpoint.checkpoint import Checkpoint
from model.config import ModelConfig

_BLOCK_SIZES = {"cpu": 16, "cuda": 64}
_EMULATED_BLOCK = 16


class StartupPhases:
    """Records the startup phases that an engine reports."""

    def __init__(self) -> None:
        self._phases = [("before", time.monotonic())]

    def __call__(self, name: str) -> None:
        """Starts a phase."""
        self._phases.append((name, time.monotonic()))

    @property
    def seconds(self) -> float:
        """Seconds since the first phase could start."""
        return time.monotonic() - self._phases[0][1]

    def __str__(self) -> str:
        phases = [*self._phases, ("", time.monotonic())]
        return ", ".join(f"{name} {end - start:.1f} s" for (name, start), (_, end) in pairwise(phases[1:]))


def build_engine(
    context: StageContext,
    shape: ModelConfig | None,
    read: Callable[..., Checkpoint] | None = None,
    announce: Callable[[str], None] = lambda _phase: None,
    cache_tokens: int = 0,
    **options: Any,
) -> Engine:
    """An engine on the stage's device, with the default weights if there is no shape. Raises EngineStartError.

    Args:     read: reads the weights; by default random weights of this shape.     cache_tokens: capacity of the KV
    cache; 0: the engine decides, which on a GPU takes nearly all memory, so that a         process can have only one
    such engine.
    """
    placement = {"device": context.device, "dtype": "float32" if context.device == "cpu" else "bfloat16"}
    cache = {"kv_blocks": -(-cache_tokens // _BLOCK_SIZES[context.device])} if cache_tokens else {}
    options = {**placement, **cache, **options}
    if shape is None:
        return startup.build_engine(WorkerConfig(weights=str(context.weights), **options), announce).engine
    folder = context.folder / "tokenizer"
    if not folder.exists():
        folder.mkdir()
        for path in context.weights.glob("tokenizer*.json"):  # of another vocabulary; the engine does not use it
            shutil.copy(path, folder)
    return startup.build_engine(
        WorkerConfig(weights=str(folder), **options), announce, read=read or checkpoint_reader(shape)
    ).engine


def can_run_ahead(engine: Engine) -> bool:
    """Whether a step can be launched before the last one is complete."""
    return hasattr(engine.runner, "launch")


def without_run_ahead(engine: Engine) -> Engine:
    """The same engine, idle, which completes each step before it plans the next."""
    return Engine(engine.scheduler, engine.runner)


def disable_graphs(engine: Engine) -> bool:
    """Runs all further steps operation by operation. Returns whether any were captured."""
    if not isinstance(engine.runner, DeviceRunner):
        return False
    replays = engine.runner.graphs.replays
    had = bool(replays)
    replays.clear()
    return had


def build_device_engine(
    context: StageContext, shape: ModelConfig, read: Callable[..., Checkpoint] | None = None, **options: Any
) -> Engine:
    """A GPU engine by build_engine(), or its emulation on a CPU, which has fewer options."""
    if context.device == "cuda":
        return build_engine(context, shape, read, **options)
    return _emulated_engine(shape, read or checkpoint_reader(shape), context, **options)


def _emulated_engine(
    shape: ModelConfig,
    read: Callable[..., Checkpoint],
    context: StageContext,
    *,
    max_running: int,
    cache_tokens: int,
    tokens_per_step: int = 256,
    prompt_tokens_beside: int | None = None,
    dtype: str = "float32",
) -> Engine:
    decoder = read(context.folder, device=torch.device("cpu"), dtype=getattr(torch, dtype)).decoder
    blocks, kernels = -(-cache_tokens // _EMULATED_BLOCK), ReferenceKernels()
    config = RunnerConfig(
        max_running=max_running, tokens_per_step=tokens_per_step, context=shape.context, block_size=_EMULATED_BLOCK
    )
    runner = device_runner(PagedDecoder(decoder, kernels), kernels, config, blocks=blocks)
    runner.warm_up(tokens_per_step)
    runner.capture(lambda work: work)
    limits = StepLimits(
        tokens_per_step=tokens_per_step, max_running=max_running, prompt_tokens_with_decodes=prompt_tokens_beside
    )
    return Engine(Scheduler(limits, BlockPool(blocks, _EMULATED_BLOCK)), runner, runner)
