"""How a step is computed, as the runner sees it, and torch's way of it. Knows no sampling.

The other way is app/engine/cpu/compute.py. Shape legend: T tokens of the step, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

import torch
from torch import Tensor

from app.common.types import BatchPlan, Chunk
from app.engine.memory.encoder_cache import EncoderCache
from app.engine.memory.kv_cache import KVCache, PagedAttend, group_chunks, linear_rows
from model.config import ModelConfig
from model.nn.layers import seal
from model.nn.transformer import Decoder


class StepExecutor(Protocol):
    """A decoder with its KV cache. The bits of a row depend on its own sequence only."""

    config: ModelConfig

    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """Computes every chunk, after what the plan says must be done to blocks; returns them as their rows stand."""
        ...

    def logits(self, rows: Items[int]) -> Tensor:
        """Logits [rows, V] of these rows of the last step; good until the next call."""
        ...


class TorchExecutor:
    """The decoder in torch, operation by operation; on any device, for any decoder."""

    def __init__(self, decoder: Decoder, cache: KVCache, sources: EncoderCache | None = None) -> None:
        seal(decoder)
        self.config = decoder.config
        self._decoder = decoder
        self._cache = cache
        self._sources = sources
        self._hidden_TD = torch.empty(0)
        self._smallest = min(parameter.numel() for parameter in decoder.parameters() if parameter.ndim == 2)

    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """One step: decodes of like length together, every other chunk for itself."""
        if plan.clear:
            self._cache.clear(list(plan.clear))
        if plan.copies:
            self._cache.copy(plan.copies)
        groups = group_chunks(plan.chunks)
        chunks = [chunk for group in groups for chunk in group]
        tokens_T, positions_T, blocks_T = self._inputs(chunks)
        slots_X = self._cache.slot_rows(blocks_T, positions_T % self._cache.block_size)
        cross = self._sources.attend(groups) if self._sources else None
        self._hidden_TD = self._decoder(tokens_T, positions_T, PagedAttend(self._cache, groups, slots_X), cross)
        return chunks

    def logits(self, rows: Items[int]) -> Tensor:
        """In the decoder's number format."""
        padded = [*rows, *[rows[-1]] * (self._padded(len(rows)) - len(rows))]  # as many rows as the law asks for
        return self._decoder.head(self._hidden_TD[torch.tensor(padded, device=self._hidden_TD.device)])[: len(rows)]

    def _inputs(self, chunks: Items[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and blocks [T], padded to what the law of rows asks for."""
        size, padding = self._cache.block_size, self._cache.padding_block
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for chunk in chunks:
            places = range(chunk.start, chunk.stop)
            tokens += chunk.sequence.tokens[chunk.start : chunk.stop]
            positions += places
            owned = chunk.sequence.blocks
            blocks += [owned[place // size] for place in places] if owned else [padding] * len(places)
        extra = self._padded(len(tokens)) - len(tokens)
        filled = (tokens + [0] * extra, positions + [0] * extra, blocks + [padding] * extra)
        tokens_T, positions_T, blocks_T = torch.tensor(filled, device=self._cache.data.device)
        return tokens_T, positions_T, blocks_T

    def _padded(self, count: int) -> int:
        return linear_rows(count, self._cache.data.dtype, self._smallest)
