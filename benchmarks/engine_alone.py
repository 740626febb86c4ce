"""An in-process engine around a decoder that is already built: no service, no pipe, no weights directory."""

from __future__ import annotations

from functools import cache

import torch

from app.engine.cpu.compute import NativeCompute, Threads
from app.engine.cpu.library import Library
from app.engine.cpu.program import BLOCK
from app.engine.cpu.sampler import NativeSampler
from app.engine.cpu.toolchain.builder import find_or_build
from app.engine.execution.engine import Engine
from app.engine.execution.runner import Runner, Sampler, StepExecutor, TorchExecutor
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.memory.kv_cache import KVCache
from app.engine.sampling.sampler import TorchSampler
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits
from model.nn.transformer import Decoder

KERNELS = ("native", "torch")


def blocks_for(texts: int, tokens: int) -> int:
    """Blocks for so many texts of so many tokens, with what admission keeps free for those who run."""
    return texts * (-(-tokens // BLOCK) + 1)


def engine_alone(
    decoder: Decoder,
    *,
    kernels: str,
    blocks: int,
    tokens_per_step: int,
    max_running: int,
    guides: GrammarTracker | None = None,
) -> Engine:
    """Computes on the CPU, in the decoder's number format, as a service with `--kernels` native or torch would."""
    compute, sampler = _native(decoder, blocks) if kernels == "native" else _torch(decoder, blocks)
    runner = Runner(compute, sampler=sampler, guides=guides)
    runner.warm_up(max_running)
    limits = StepLimits(tokens_per_step=tokens_per_step, max_running=max_running)
    return Engine(Scheduler(limits, BlockPool(blocks, BLOCK)), runner, masks=guides)


def native_compute(decoder: Decoder, blocks: int, *, int8: bool = False) -> NativeCompute:
    """The decoder in this machine's kernels, on all threads."""
    library, threads = _kernels()
    return NativeCompute(library, decoder, threads, blocks=blocks, int8=int8)


def _native(decoder: Decoder, blocks: int) -> tuple[StepExecutor, Sampler]:
    library, threads = _kernels()
    compute = native_compute(decoder, blocks)
    return compute, NativeSampler(library.loaded, decoder.config.vocab_size, pool=threads)


def _torch(decoder: Decoder, blocks: int) -> tuple[StepExecutor, Sampler]:
    kv_cache = KVCache(
        decoder.config,
        blocks=blocks,
        block_size=BLOCK,
        dtype=decoder.embedding.dtype,
        device=decoder.embedding.device,
    )
    return TorchExecutor(decoder, kv_cache), TorchSampler()


@cache
def _kernels() -> tuple[Library, Threads]:
    """One pool for all engines of a benchmark: they take their steps in turn."""
    library = Library(find_or_build())
    return library, Threads(library, torch.get_num_threads())
