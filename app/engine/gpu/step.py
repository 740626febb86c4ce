"""One step on the device: forward pass, sampling, row updates, and the samples packed for one copy to the host.

A decode step reads all inputs from device memory, so that it can be captured once and replayed
(app/engine/gpu/graphs.py). Shape legend: R rows of resident state, S rows of the step, T tokens of it, X flattened.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.common.types import SampledToken
from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.kernels.interface import AttentionBatch, Kernels
from app.engine.gpu.kernels.reference_operations import cache_slots
from app.engine.gpu.kernels.sampling_state import TOP, SampleOut
from app.engine.gpu.resident_batch import ResidentBatch, StepInputs

# Shape legend: S sampled rows, N most likely tokens of each, X numbers of a row: token, its log-probability, N ids, N
# log-probabilities; floats are stored as their bits.


def pack_samples(out: SampleOut) -> Tensor:
    """Packs samples as [S, X] int32, on the device."""
    floats = (out.logprob_S[:, None].view(torch.int32), out.top_logprobs_SN.view(torch.int32))
    return torch.cat((out.tokens_S[:, None], floats[0], out.top_ids_SN, floats[1]), dim=1)


def unpack_samples(numbers_SX: Tensor, counts: Items[int | None]) -> list[SampledToken]:
    """Unpacks the result of pack_samples() on the host. Rows after the last of `counts` are padding.

    counts: the number of most likely tokens that each row's request wants; None for no log-probabilities at all.
    """
    tokens = numbers_SX[: len(counts), 0].tolist()
    if all(count is None for count in counts):
        return [SampledToken(token if token >= 0 else None) for token in tokens]
    ids = numbers_SX[: len(counts), 2 : 2 + TOP].tolist()
    floats_SX = numbers_SX.view(torch.float32)
    logprobs, top_logprobs = floats_SX[: len(counts), 1].tolist(), floats_SX[: len(counts), 2 + TOP :].tolist()
    samples = []
    for i, (token, count) in enumerate(zip(tokens, counts, strict=True)):
        if token < 0 or count is None:
            samples.append(SampledToken(token if token >= 0 else None))
        else:
            likely = zip(ids[i][:count], top_logprobs[i][:count], strict=True)
            samples.append(SampledToken(token, logprobs[i], tuple(pair for pair in likely if pair[0] >= 0)))
    return samples


_TILE_ROWS = 64
"""Query rows (tokens times heads that share keys) of one attention program."""
_MIN_TILE_TOKENS = 16


class StepProgram:
    """Runs steps. The only writer of the KV cache and of the resident rows."""

    def __init__(
        self,
        decoder: PagedDecoder,
        kernels: Kernels,
        cache: Tensor,
        resident: ResidentBatch,
        *,
        max_rows: int,
        tokens: int = 0,
    ) -> None:
        """max_rows: largest decode step. tokens: number that every step is padded to, if shapes are fixed; else 0."""
        config = decoder.config
        self.tokens = tokens
        self.tile_tokens = max(_MIN_TILE_TOKENS, _TILE_ROWS // (config.n_heads // config.n_kv_heads))
        """Query tokens of an attention tile in steps with prompts."""
        self.decoder = decoder
        self.resident = resident
        self.cache = cache
        self.rows_S = torch.full((max_rows,), resident.padding_row, dtype=torch.int32, device=cache.device)
        """Resident rows of a decode step; set before it runs."""
        self.out = SampleOut.empty(max_rows, cache.device)
        """Samples of the last step."""
        self._kernels = kernels
        self._order_S = torch.arange(max_rows, dtype=torch.int32, device=cache.device)
        self._ones_S = torch.ones_like(self._order_S)
        self._hidden_TD = torch.empty(0, device=cache.device)

    def prepare(self, clear_N: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
        """Zeroes blocks of the cache [layer, 2, block, ..], then copies blocks."""
        if len(clear_N):
            self.cache.index_fill_(2, clear_N.long(), 0)
        if len(targets_N):
            self.cache.index_copy_(2, targets_N.long(), self.cache.index_select(2, sources_N.long()))

    def decode(self, count: int, splits: int) -> None:
        """Generates a token for each of the first `count` rows of rows_S. splits: at least those of the longest one."""
        rows_S = self.rows_S[:count]
        lookup = self._kernels.look_up(rows_S, self.resident.state)
        batch = AttentionBatch(
            block_table_RB=self.resident.state.block_table_RB,
            tile_row_X=lookup.tile_rows_S,
            tile_start_X=self._order_S[:count],
            tile_position_X=lookup.positions_S,
            tile_length_X=self._ones_S[:count],
            tile_tokens=1,
            max_splits=splits,
        )
        tokens_T, positions_T, slots_T = (
            self._padded(x, filler)
            for x, filler in ((lookup.tokens_S, 0), (lookup.positions_S, 0), (lookup.slots_S, -1))
        )
        self._hidden_TD = self.decoder(self.cache, tokens_T, positions_T, slots_T, batch)
        self._sample(self._hidden_TD[:count], rows_S, lookup.positions_S)

    def run_mixed(self, inputs: StepInputs[Tensor], splits: int) -> None:
        """Runs a step with prompts; samples for the chunks that reach the end of their sequence."""
        self.forward(inputs, splits)
        if len(inputs.ends_S):
            ends_S = inputs.ends_S.long()
            self._sample(self._hidden_TD[ends_S], inputs.end_rows_S, inputs.positions_T[ends_S])

    def forward(self, inputs: StepInputs[Tensor], splits: int) -> None:
        """run_mixed() without sampling."""
        state = self.resident.state
        batch = AttentionBatch(
            block_table_RB=state.block_table_RB,
            tile_row_X=inputs.tile_row_X,
            tile_start_X=inputs.tile_start_X,
            tile_position_X=inputs.tile_position_X,
            tile_length_X=inputs.tile_length_X,
            tile_tokens=self.tile_tokens,
            max_splits=splits,
        )
        tokens_T = inputs.tokens_T.where(inputs.tokens_T >= 0, state.last_token_R[inputs.rows_T.long()])
        slots_T = cache_slots(inputs.rows_T, inputs.positions_T, state)
        self._hidden_TD = self.decoder(self.cache, tokens_T, inputs.positions_T, slots_T, batch)

    def logits(self, indices_S: Tensor) -> Tensor:
        """Logits [S, V] of these rows of the last step."""
        return self.decoder.head(self._hidden_TD[indices_S])

    def _sample(self, hidden_SD: Tensor, rows_S: Tensor, positions_S: Tensor) -> None:
        out = self.out.first(len(rows_S))
        next_S = positions_S + 1
        self._kernels.sample(self.decoder.head(hidden_SD), rows_S, next_S, self.resident.table, out)
        self._kernels.advance(rows_S, next_S, out.tokens_S, self.resident.state)

    def _padded(self, numbers_S: Tensor, filler: int) -> Tensor:
        extra = self.tokens - len(numbers_S)
        return numbers_S if extra <= 0 else torch.cat((numbers_S, numbers_S.new_full((extra,), filler)))
