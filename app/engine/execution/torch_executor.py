"""Executor of steps in torch: the reference, and the only one for models with an encoder.

Shape legend: T tokens of the step, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.common.types import BatchPlan, Chunk
from app.engine.memory.encoder_cache import EncoderCache
from app.engine.memory.kv_cache import KVCache, PagedAttend, group_chunks, linear_rows
from model.nn.layers import cache_attributes
from model.nn.transformer import Decoder


class TorchExecutor:
    """The decoder in torch, operation by operation; on any device, for any decoder."""

    def __init__(self, decoder: Decoder, cache: KVCache, sources: EncoderCache | None = None) -> None:
        cache_attributes(decoder)
        self.config = decoder.config
        self._decoder = decoder
        self._cache = cache
        self._sources = sources
        self._hidden_TD = torch.empty(0)
        self._smallest = min(parameter.numel() for parameter in decoder.parameters() if parameter.ndim == 2)

    @torch.inference_mode()
    def run(self, plan: BatchPlan) -> Items[Chunk]:
        """Computes one step: decodes of similar length together, every other chunk separately."""
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

    @torch.inference_mode()
    def logits(self, rows: Items[int]) -> Tensor:
        """Logits in the decoder's dtype."""
        padded = [*rows, *[rows[-1]] * (self._padded(len(rows)) - len(rows))]  # for batch invariance
        return self._decoder.head(self._hidden_TD[torch.tensor(padded, device=self._hidden_TD.device)])[: len(rows)]

    def _inputs(self, chunks: Items[Chunk]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions and blocks [T], padded as batch invariance requires."""
        size, padding = self._cache.block_size, self._cache.padding_block
        tokens: list[int] = []
        positions: list[int] = []
        blocks: list[int] = []
        for chunk in chunks:
            chunk_positions = range(chunk.start, chunk.stop)
            tokens += chunk.sequence.tokens[chunk.start : chunk.stop]
            positions += chunk_positions
            owned = chunk.sequence.blocks
            blocks += [owned[i // size] for i in chunk_positions] if owned else [padding] * len(chunk_positions)
        extra = self._padded(len(tokens)) - len(tokens)
        filled = (tokens + [0] * extra, positions + [0] * extra, blocks + [padding] * extra)
        tokens_T, positions_T, blocks_T = torch.tensor(filled, device=self._cache.data.device)
        return tokens_T, positions_T, blocks_T

    def _padded(self, count: int) -> int:
        return linear_rows(count, self._cache.data.dtype, self._smallest)
