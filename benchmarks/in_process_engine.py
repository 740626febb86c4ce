"""An engine in this process around a loaded decoder: no service, no pipe, no weights directory."""

from __future__ import annotations

from functools import cache

import torch

from app.engine.cpu.compute import NativeCompute, ThreadPool
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


def blocks_for(sequences: int, tokens: int) -> int:
    """Blocks for `sequences` sequences of `tokens` tokens, including the reserve that the scheduler keeps free."""
    return sequences * (-(-tokens // BLOCK) + 1)


def build_in_process_engine(
    decoder: Decoder,
    *,
    kernels: str,
    blocks: int,
    tokens_per_step: int,
    max_running: int,
    grammar_tracker: GrammarTracker | None = None,
) -> Engine:
    """Builds a CPU engine as a service with `--kernels` native or torch would, in the decoder's number format."""
    executor, sampler = _native(decoder, blocks) if kernels == "native" else _torch(decoder, blocks)
    runner = Runner(executor, sampler=sampler, grammars=grammar_tracker)
    runner.warm_up(max_running)
    limits = StepLimits(tokens_per_step=tokens_per_step, max_running=max_running)
    return Engine(Scheduler(limits, BlockPool(blocks, BLOCK)), runner, masks=grammar_tracker)


def native_compute(decoder: Decoder, blocks: int, *, int8: bool = False) -> NativeCompute:
    """Native kernels for the decoder, on all threads."""
    library, threads = _library_and_threads()
    return NativeCompute(library, decoder, threads, blocks=blocks, int8=int8)


def _native(decoder: Decoder, blocks: int) -> tuple[StepExecutor, Sampler]:
    library, threads = _library_and_threads()
    executor = native_compute(decoder, blocks)
    return executor, NativeSampler(library.loaded, decoder.config.vocab_size, pool=threads)


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
def _library_and_threads() -> tuple[Library, ThreadPool]:
    """Shared by all engines of a benchmark, which run their steps in turn."""
    library = Library(find_or_build())
    return library, ThreadPool(library, torch.get_num_threads())
