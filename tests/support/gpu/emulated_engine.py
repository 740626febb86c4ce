"""Emulates a GPU engine on any device with a decoder: reference kernels in torch, no graphs."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from app.engine.execution.engine import Engine
from app.engine.gpu.cuda_capture import Capture
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.kernels.interface import Kernels
from app.engine.gpu.runner import DeviceRunner
from app.engine.gpu.setup import device_runner
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from benchmarks.gpu.reference_kernels import ReferenceKernels
from model.nn.transformer import Decoder
from tests.support.model.tiny_models import block_pools


def tiny_device_runner(
    decoder: Decoder,
    *,
    blocks: int | Items[int] = 64,
    block_size: int = 16,
    tokens_per_step: int = 128,
    max_running: int = 32,
    deterministic: bool = False,
    kernels: Kernels | None = None,
    guides: GrammarTracker | None = None,
) -> DeviceRunner:
    """A device runner that shares the weights of `decoder`."""
    kernels = kernels or ReferenceKernels()
    return device_runner(
        PagedDecoder(decoder, kernels),
        kernels,
        StepLimits(tokens_per_step=tokens_per_step, max_running=max_running),
        blocks=blocks,
        block_size=block_size,
        context=decoder.config.context,
        deterministic=deterministic,
        grammars=guides,
    )


def tiny_device_engine(
    decoder: Decoder, *, depth: int = 1, capture: Capture | None = None, is_warmed_up: bool = True, **overrides: Any
) -> Engine:
    """An engine around tiny_device_runner(), which runs one step ahead if depth is 1."""
    sizes = {"tokens_per_step": 128, "max_running": 32, "blocks": 64, **overrides}
    runner = tiny_device_runner(decoder, **sizes)
    if is_warmed_up:
        runner.warm_up(sizes["tokens_per_step"])
    if capture:
        runner.capture(capture)
    limits = StepLimits(tokens_per_step=sizes["tokens_per_step"], max_running=sizes["max_running"])
    scheduler = Scheduler(limits, *block_pools(decoder.config, sizes["blocks"], sizes.get("block_size", 16)))
    return Engine(scheduler, runner, runner if depth else None, masks=sizes.get("guides"))
