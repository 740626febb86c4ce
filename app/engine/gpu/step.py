"""One step on the device: forward pass, draw, advancing rows, and the draws packed for one copy to the host.

A decode step reads all of its inputs from device memory, so that it can be captured once and replayed
(app/engine/gpu/graphs.py). Shape legend: R rows of resident state, S rows of the step, T tokens of it, X flattened.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple

import torch
from torch import Tensor

from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.kernels.interface import AttentionBatch, Kernels
from app.engine.gpu.kernels.reference_operations import slots
from app.engine.gpu.kernels.sampling_state import TOP, SampleOut
from app.engine.gpu.resident_batch import ResidentBatch
from app.engine.sampling.sampler_io import SampledToken

# Shape legend: S rows that were drawn for, N most likely tokens of each, X numbers of a row: token, its
# log-probability, N ids, N log-probabilities; floats by their bits.


def packed(out: SampleOut) -> Tensor:
    """[S, X] int32, on the device."""
    floats = (out.logprob_S[:, None].view(torch.int32), out.top_logprobs_SN.view(torch.int32))
    return torch.cat((out.tokens_S[:, None], floats[0], out.top_ids_SN, floats[1]), dim=1)


def unpacked(numbers_SX: Tensor, counts: Items[int | None]) -> list[SampledToken]:
    """Of packed() on the host. Rows behind the last of `counts` are padding.

    counts: how many of the most likely tokens each row's request wants; None for no log-probabilities at all.
    """
    tokens = numbers_SX[: len(counts), 0].tolist()
    if all(count is None for count in counts):
        return [SampledToken(token if token >= 0 else None) for token in tokens]
    ids = numbers_SX[: len(counts), 2 : 2 + TOP].tolist()
    floats_SX = numbers_SX.view(torch.float32)
    own, top = floats_SX[: len(counts), 1].tolist(), floats_SX[: len(counts), 2 + TOP :].tolist()
    drawn = []
    for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        if token < 0 or count is None:
            drawn.append(SampledToken(token if token >= 0 else None))
        else:
            likely = zip(ids[i][:count], top[i][:count], strict=True)
            drawn.append(SampledToken(token, own[i], tuple(pair for pair in likely if pair[0] >= 0)))
    return drawn


class StepInputs(NamedTuple):
    """A step with prompts in it, as the host laid it out (app/engine/gpu/resident_batch.py), on the device."""

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
        self.rows_S = torch.full((most,), rows.padding_row, dtype=torch.int32, device=cache.device)
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
