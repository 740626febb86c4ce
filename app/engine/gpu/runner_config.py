"""A runner for a device out of a decoder and kernels: cache, rows, steps, graphs. Knows no configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.engine.execution.runner import Sampler, TracksGrammars
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.graphs import DecodeGraphs
from app.engine.gpu.kernels.interface import Kernels
from app.engine.gpu.kernels.sampling_state import SamplingTable
from app.engine.gpu.layout import decode_buckets, splits
from app.engine.gpu.resident_batch import ResidentBatch
from app.engine.gpu.runner import DeviceRunner, Shapes
from app.engine.gpu.step import StepProgram
from app.engine.sampling.sampler import TorchSampler

_TILE_ROWS = 64
"""Query tokens times heads that share keys, which one program of the attention takes at once."""
_LEAST_TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """What a runner must have room for."""

    max_running: int
    tokens_per_step: int
    context: int
    block_size: int
    deterministic: bool = False
    """Every step has the same shapes, so that no library takes another formula for a row because of its neighbours."""


def device_runner(
    decoder: PagedDecoder,
    kernels: Kernels,
    wishes: RunnerConfig,
    *,
    blocks: int,
    sampler: Sampler | None = None,
    guides: TracksGrammars | None = None,
) -> DeviceRunner:
    """With a cache of `blocks` blocks, and one more that is nobody's."""
    config, most, like = decoder.config, wishes.max_running, decoder.embedding
    table = SamplingTable(most + 1, config.vocab_size, like.device)
    table.with_counts()  # graphs must know where they lie
    rows = ResidentBatch(
        count=most, context=wishes.context, block_size=wishes.block_size, padding_block=blocks, table=table
    )
    # Slot before head: the layout that kernels of others read, too.
    shape = (config.n_layers, 2, blocks + 1, wishes.block_size, config.n_kv_heads, config.head_dim)
    cache = torch.zeros(shape, dtype=like.dtype, device=like.device)
    tokens = wishes.tokens_per_step if wishes.deterministic else 0
    steps = StepProgram(decoder, kernels, cache, rows, most=most, tokens=tokens)
    buckets = (most,) if wishes.deterministic else decode_buckets(most)
    graphs = DecodeGraphs(steps, buckets=buckets, max_splits=splits(wishes.context))
    shapes = Shapes(
        tile_tokens=max(_LEAST_TILE, _TILE_ROWS // (config.n_heads // config.n_kv_heads)),
        tokens=tokens,
        head_rows=most if wishes.deterministic else 0,
    )
    return DeviceRunner(graphs, shapes, sampler=sampler or TorchSampler(), guides=guides)
