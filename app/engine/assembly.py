"""An engine out of a configuration: weights, memory, kernels, warm-up. Knows no pipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from app.engine.blocks import BlockPool
from app.engine.compute import Compute, TorchCompute
from app.engine.defaults import sampling_defaults
from app.engine.engine import Engine
from app.engine.frames import Ready, WorkerConfig
from app.engine.guides import Guides
from app.engine.kv_cache import KVCache
from app.engine.memory import CacheRoom, choose_context, free_memory
from app.engine.native.compute import NativeCompute, Threads
from app.engine.native.library import Library
from app.engine.native.program import BLOCK, head_numbers
from app.engine.runner import Runner
from app.engine.scheduler import Scheduler, SchedulerLimits
from app.engine.source_cache import SourceCache
from model.checkpoint import Checkpoint, load
from model.device import choose_device, choose_dtype, describe
from model.tokenizer import Tokenizer


class StartError(ValueError):
    """The configuration does not work; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Assembled:
    """An engine that can take requests."""

    engine: Engine
    guides: Guides
    ready: Ready


def assemble(config: WorkerConfig, announce: Callable[[str], None] = lambda _phase: None) -> Assembled:
    """Loads the weights, takes the cache's memory, warms up; `announce` hears what is being done. Raises StartError."""
    announce("loading weights")
    try:
        if config.threads:
            torch.set_num_threads(config.threads)
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        checkpoint = load(Path(config.weights), device=device, dtype=dtype)
        defaults = sampling_defaults(checkpoint.generation, Path(config.weights) / "generation_config.json")
        limits = SchedulerLimits(tokens_per_step=config.tokens_per_step, max_running=config.max_running)
        room = _room(config, checkpoint, dtype, device)
        blocks = room.blocks(config.kv_blocks, free_memory(device))
    except ValueError as error:
        raise StartError(str(error)) from None
    compute = _compute(config, checkpoint, room, blocks, device)
    guides = Guides(
        lambda: Tokenizer.load(Path(config.weights)).bytes_of,
        vocab_size=room.shape.vocab_size,
        most=config.max_running,
    )
    runner = Runner(compute, guides=guides)
    announce("warming up")
    runner.warm_up(config.max_running)
    pool = BlockPool(blocks, room.block_size)
    ready = _ready(checkpoint, room.context, defaults, dtype, device, pool)
    return Assembled(Engine(Scheduler(limits, pool, checkpoint.version), runner), guides, ready)


def _room(config: WorkerConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> CacheRoom:
    shape = checkpoint.decoder.config
    if config.library:
        shape = replace(shape, head_dim=head_numbers(shape))
    return CacheRoom(
        shape=shape,
        context=choose_context(shape, config.max_context),
        block_size=BLOCK if device.type == "cpu" else 64,
        max_running=config.max_running,
        dtype=dtype,
    )


def _compute(
    config: WorkerConfig, checkpoint: Checkpoint, room: CacheRoom, blocks: int, device: torch.device
) -> Compute:
    decoder = checkpoint.decoder
    if config.library:
        library = Library(Path(config.library))
        return NativeCompute(library, decoder, Threads(library, torch.get_num_threads()), blocks=blocks)
    cache = KVCache(decoder.config, blocks=blocks, block_size=room.block_size, dtype=room.dtype, device=device)
    if not decoder.config.n_encoder_layers:
        return TorchCompute(decoder, cache)
    slots, context = config.max_running, room.context
    return TorchCompute(
        decoder, cache, SourceCache(decoder, slots=slots, context=context, dtype=room.dtype, device=device)
    )


def _ready(
    checkpoint: Checkpoint,
    context: int,
    defaults: dict[str, float],
    dtype: torch.dtype,
    device: torch.device,
    blocks: BlockPool,
) -> Ready:
    shape = checkpoint.decoder.config
    return Ready(
        context=context,
        vocab_size=shape.vocab_size,
        n_params=checkpoint.decoder.n_params,
        dtype=str(dtype).removeprefix("torch."),
        device=describe(device),
        weights_version=checkpoint.version,
        eos_ids=checkpoint.eos_ids,
        sampling_defaults=defaults,
        start_id=checkpoint.bos_id if checkpoint.bos_id is not None else next(iter(checkpoint.eos_ids), None),
        blocks_total=blocks.total,
        block_size=blocks.block_size,
        has_encoder=shape.n_encoder_layers > 0,
    )
