"""Engines as a service would build them, and the emulation of a GPU engine on a CPU."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from app.common.ipc import WorkerConfig
from app.engine import startup
from app.engine.execution.engine import Engine
from app.engine.execution.torch_executor import groups_of
from app.engine.gpu.cuda_capture import Capture
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.setup import device_runner
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from benchmarks.gpu.reference_kernels import ReferenceKernels
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.shapes import SHAPES, WeightsInMemory, smaller, weights_in_memory
from model.checkpoint.checkpoint import load_decoder
from model.config import ModelConfig
from model.nn.transformer import Decoder

_log = logging.getLogger(__name__)
_BLOCK_SIZES = {"cpu": 16, "cuda": 64}


class StartupPhases:
    """Records the startup phases that an engine reports: seconds, and device memory that torch holds at their ends."""

    def __init__(self) -> None:
        self._phases = [("before", time.monotonic(), 0)]
        self.numerics = ""
        """With their reason; known when the engine is built."""

    def __call__(self, name: str) -> None:
        """Starts a phase."""
        self._phases.append((name, time.monotonic(), _reserved_bytes()))

    @property
    def proof(self) -> str:
        """What the self-test of a deterministic engine reported; empty without one."""
        return next((name for name, _, _ in self._phases if "proven" in name), "")

    def findings(self) -> Iterator[Finding]:
        """When the engine is built: its seconds, and what it computes with."""
        seconds = time.monotonic() - self._phases[0][1]
        yield Finding(what="engine built", value=seconds, unit="s", note=str(self))
        numerics, _, reason = self.numerics.partition(": ")
        ok = numerics.startswith("triton-") if torch.cuda.is_initialized() else None
        yield Finding(what="numerics", value=numerics, ok=ok, note=reason)

    def __str__(self) -> str:
        phases = [*self._phases, ("", time.monotonic(), _reserved_bytes())]
        return ", ".join(
            f"{name} {end - start:.1f} s" + f" to {held / 2**30:.2f} GiB" * bool(held)
            for (name, start, _), (_, end, held) in pairwise(phases[1:])
        )


def _reserved_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0


def shape_of(context: StageContext, name: str = "") -> ModelConfig:
    """The shape by name (by default the stage's variant), or a tiny one of the same layout."""
    shape = SHAPES[{"gpt2": "A"}.get(name or context.variant, name or context.variant)]
    return smaller(shape) if context.tiny else shape


def build_engine(
    context: StageContext,
    shape: ModelConfig | None,
    weights: WeightsInMemory | None = None,
    phases: StartupPhases | None = None,
    cache_tokens: int = 0,
    **options: Any,
) -> Engine:
    """An engine on the stage's device, with the default weights if there is no shape. Raises EngineStartError.

    Args:
        weights: by default random ones of this shape.
        cache_tokens: capacity of the KV cache; 0: the engine decides, which on a GPU takes nearly all memory, so that a
            process can have only one such engine.
    """
    placement = {"device": context.device, "dtype": "float32" if context.device == "cpu" else "bfloat16"}
    cache = {"kv_blocks": -(-cache_tokens // _BLOCK_SIZES[context.device])} if cache_tokens else {}
    phases, folder = phases or StartupPhases(), context.weights
    if shape:
        folder = context.folder / "tokenizer"
        if not folder.exists():
            folder.mkdir()
            for path in context.weights.glob("tokenizer*.json"):  # of another vocabulary; the engine does not use it
                shutil.copy(path, folder)
        weights = weights or weights_in_memory(shape)
    config = WorkerConfig(weights=str(folder), speculate="off", **{**placement, **cache, **options})
    built = startup.build_engine(config, phases, (lambda _: weights) if weights else None)
    phases.numerics = f"{built.ready.numerics}: {built.ready.numerics_reason}"
    _log.info("numerics %s", phases.numerics)
    return built.engine


def build_device_engine(
    context: StageContext,
    shape: ModelConfig,
    weights: WeightsInMemory | None = None,
    *,
    max_running: int,
    cache_tokens: int,
    tokens_per_step: int = 256,
    prompt_tokens_beside: int | None = None,
    dtype: str = "",
) -> Engine:
    """A GPU engine by build_engine(), or its emulation on a CPU."""
    sizes: dict[str, Any] = {"max_running": max_running, "tokens_per_step": tokens_per_step}
    weights = weights or weights_in_memory(shape)
    if context.device == "cuda":
        options = {"prompt_tokens_beside": prompt_tokens_beside, "dtype": dtype}
        sizes |= {name: value for name, value in options.items() if value}
        return build_engine(context, shape, weights, cache_tokens=cache_tokens, **sizes)
    decoder = load_decoder(weights, device=torch.device("cpu"), dtype=getattr(torch, dtype or "float32"))
    limits = StepLimits(prompt_tokens_with_decodes=prompt_tokens_beside, **sizes)
    block = _BLOCK_SIZES["cpu"]
    return emulated_engine(decoder, limits, blocks=-(-cache_tokens // block), block_size=block)


def emulated_engine(
    decoder: Decoder, limits: StepLimits, *, blocks: int, block_size: int, capture: Capture = lambda work: work
) -> Engine:
    """A GPU's engine with its memory on the CPU: reference kernels, and a step that runs again instead of a graph."""
    kernels, context = ReferenceKernels(), decoder.config.context
    paged = PagedDecoder(decoder, kernels)
    runner = device_runner(paged, kernels, limits, blocks=blocks, block_size=block_size, context=context)
    runner.warm_up(limits.tokens_per_step)
    runner.capture(capture)
    pools = [BlockPool(blocks, block_size, window=group.window) for group in groups_of(decoder)]
    return Engine(Scheduler(limits, *pools), runner, runner)
