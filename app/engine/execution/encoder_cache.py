"""Encoder cache: keys and values of the requests' sources, and attention over them.

A source is encoded once: its keys and values of every decoder block stay in a slot until another source needs the slot.
Each running request can have a slot. An evicted source is encoded again, to the same bits, because each source
is encoded alone. Shape legend: S tokens of a source, L its positions in whole tiles, N query tokens, B sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.engine.execution.torch_executor import KVCache, RowGroup, as_addend, attend_groups, groups_of
from app.engine.memory.memory_plan import TILE, source_tokens
from app.engine.scheduling.batch_plan import Chunk
from model.nn.attention import EncoderAttend
from model.nn.transformer import Decoder

Source = tuple[int, ...]


class EncoderCache:
    """Slots for sources; the least recently used source is evicted first."""

    def __init__(self, decoder: Decoder, *, slots: int, context: int) -> None:
        self._decoder = decoder
        self._tiles = source_tokens(context) // TILE
        (group,) = groups_of(decoder)
        self._cache = KVCache(decoder, group, blocks=slots * self._tiles, block_size=TILE)
        self._free = list(range(slots))
        self._slots: OrderedDict[Source, int] = OrderedDict()

    def attend(self, groups: Items[Items[Chunk]]) -> PagedEncoderAttend:
        """Cross-attention of one step; encodes sources that are not cached. A step has at most `slots` of them."""
        sources = dict.fromkeys(chunk.sequence.request.source for group in groups for chunk in group)
        for source in sources:
            if source in self._slots:
                self._slots.move_to_end(source)
        for source in sources:
            if source not in self._slots:
                self._encode(source)
        return PagedEncoderAttend(self._cache, [self._row_group(chunks) for chunks in groups])

    def _encode(self, source: Source) -> None:
        slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
        try:
            self._encode_into(slot, source)
        except BaseException:  # most likely out of memory: keep the slot usable
            self._free.append(slot)
            raise
        self._slots[source] = slot

    def _encode_into(self, slot: int, source: Source) -> None:
        blocks = self._blocks(slot)
        # Non-finite values of the previous source would reach the new one even with weight 0.
        self._cache.clear(blocks)
        device = self._cache.data.device
        positions_S = torch.arange(len(source), device=device)
        tokens_S = torch.tensor(source, device=device)
        all_real_1S = torch.ones(1, len(source), dtype=torch.bool, device=device)
        slots_X = self._cache.slot_rows(blocks[0] + positions_S // TILE, positions_S % TILE)
        for layer, (k_SKC, v_SKC) in enumerate(self._decoder.encode(tokens_S, positions_S, EncoderAttend(all_real_1S))):
            self._cache.write(layer, k_SKC, v_SKC, slots_X)

    def _row_group(self, chunks: Items[Chunk]) -> RowGroup:
        device = self._cache.data.device
        sources = [chunk.sequence.request.source for chunk in chunks]
        tiles = -(-max(map(len, sources)) // TILE)
        table = [self._blocks(self._slots[source])[:tiles] for source in sources]
        lengths_B111 = torch.tensor([len(source) for source in sources], device=device)[:, None, None, None]
        hidden_B11L = torch.arange(tiles * TILE, device=device) >= lengths_B111
        return RowGroup(
            batch=len(chunks),
            length=chunks[0].stop - chunks[0].start,
            block_rows_X=self._cache.block_rows(torch.tensor(table, device=device)),
            hidden_B1NL=as_addend(hidden_B11L),
        )

    def _blocks(self, slot: int) -> list[int]:
        return list(range(slot * self._tiles, (slot + 1) * self._tiles))


class PagedEncoderAttend:
    """A `CrossAttend` of model.nn.attention for one step."""

    def __init__(self, cache: KVCache, groups: Items[RowGroup]) -> None:
        self._cache = cache
        self._groups = groups

    def __call__(self, layer: int, q_THC: Tensor) -> Tensor:
        return attend_groups(self._cache, layer, self._groups, q_THC)
