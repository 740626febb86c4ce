"""A step on the device: forward, draw, and the rows one token further. Reads nothing back.

A decode step takes all that it needs from what lies on the device already, so that it can be captured once and replayed
(app/engine/gpu/graphs.py). Shape legend: R rows of resident state, S rows of the step, T tokens of it, X flattened.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.kernels.interface import AttentionBatch, Kernels
from app.engine.gpu.kernels.reference_rows import slots
from app.engine.gpu.kernels.sampling_state import SampleOut
from app.engine.gpu.resident_batch import ResidentBatch


class StepInputs(NamedTuple):
    """A step with prompts in it, as the host laid it out (app/engine/gpu/layout.py), on the device."""

    tokens_T: Tensor
    rows_T: Tensor
    positions_T: Tensor
    tile_row_X: Tensor
    tile_start_X: Tensor
    tile_position_X: Tensor
    tile_length_X: Tensor
    ends_S: Tensor
    end_rows_S: Tensor


class StepProgram:
    """The one writer of the cache and of the rows."""

    def __init__(
        self, decoder: PagedDecoder, kernels: Kernels, cache: Tensor, rows: ResidentBatch, *, most: int, tokens: int = 0
    ) -> None:
        """most: rows of a decode step. tokens: to which every step is padded, where shapes must not change; else 0."""
        self.decoder = decoder
        self.rows = rows
        self.cache = cache
        self.rows_S = torch.full((most,), rows.nobody, dtype=torch.int32, device=cache.device)
        """Of a decode step; set before it."""
        self.out = SampleOut.empty(most, cache.device)
        """Of the last step."""
        self._kernels = kernels
        self._tokens = tokens
        self._order_S = torch.arange(most, dtype=torch.int32, device=cache.device)
        self._ones_S = torch.ones_like(self._order_S)
        self._hidden_TD = torch.empty(0, device=cache.device)

    def prepare(self, clear_N: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
        """Blocks zeroed, then copied: [layer, 2, block, ..]."""
        if len(clear_N):
            self.cache.index_fill_(2, clear_N.long(), 0)
        if len(targets_N):
            self.cache.index_copy_(2, targets_N.long(), self.cache.index_select(2, sources_N.long()))

    def decode(self, count: int, splits: int) -> None:
        """One token for each of the first `count` of rows_S; `splits` at least those of the longest."""
        rows_S = self.rows_S[:count]
        places = self._kernels.look_up(rows_S, self.rows.state)
        batch = AttentionBatch(
            block_table_RB=self.rows.block_table_RB,
            tile_row_X=places.tile_rows_S,
            tile_start_X=self._order_S[:count],
            tile_position_X=places.positions_S,
            tile_length_X=self._ones_S[:count],
            tile_tokens=1,
            max_splits=splits,
        )
        tokens_T, positions_T, slots_T = (
            self._padded(x, filler)
            for x, filler in ((places.tokens_S, 0), (places.positions_S, 0), (places.slots_S, -1))
        )
        self._hidden_TD = self.decoder(self.cache, tokens_T, positions_T, slots_T, batch)
        self._draw(self._hidden_TD[:count], rows_S, places.positions_S)

    def mixed(self, told: StepInputs, *, tile_tokens: int, splits: int) -> None:
        """Whatever the host laid out; draws for the chunks that end with their sequence."""
        self.forward(told, tile_tokens=tile_tokens, splits=splits)
        if len(told.ends_S):
            ends_S = told.ends_S.long()
            self._draw(self._hidden_TD[ends_S], told.end_rows_S, told.positions_T[ends_S])

    def forward(self, told: StepInputs, *, tile_tokens: int, splits: int) -> None:
        """As mixed(), without the draw."""
        rows = self.rows
        batch = AttentionBatch(
            block_table_RB=rows.block_table_RB,
            tile_row_X=told.tile_row_X,
            tile_start_X=told.tile_start_X,
            tile_position_X=told.tile_position_X,
            tile_length_X=told.tile_length_X,
            tile_tokens=tile_tokens,
            max_splits=splits,
        )
        tokens_T = told.tokens_T.where(told.tokens_T >= 0, rows.last_token_R[told.rows_T.long()])
        slots_T = slots(told.rows_T, told.positions_T, rows.state)
        self._hidden_TD = self.decoder(self.cache, tokens_T, told.positions_T, slots_T, batch)

    def logits(self, places_S: Tensor) -> Tensor:
        """[S, V] of these rows of the last step."""
        return self.decoder.head(self._hidden_TD[places_S])

    def _draw(self, hidden_SD: Tensor, rows_S: Tensor, positions_S: Tensor) -> None:
        out = self.out.first(len(rows_S))
        next_S = positions_S + 1
        self._kernels.sample(self.decoder.head(hidden_SD), rows_S, next_S, self.rows.table, out)
        self._kernels.advance(rows_S, next_S, out.tokens_S, self.rows.state)

    def _padded(self, numbers_S: Tensor, filler: int) -> Tensor:
        extra = self._tokens - len(numbers_S)
        return numbers_S if extra <= 0 else torch.cat((numbers_S, numbers_S.new_full((extra,), filler)))
