"""The two parts of a step on the device: the forward pass, and the draw of a token for each sequence that samples.

Both read all inputs from device memory and leave their results there, so that they can be captured once and replayed
(app/engine/gpu/graphs.py). Between them lie the hidden states, with the tokens that sample first.
Shape legend: R resident rows that may sample, S rows of the draw, T tokens of the step, X flattened.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.engine.gpu.decoder import PagedDecoder
from app.engine.gpu.kernels.interface import AttentionBatch, Kernels, RowLookup
from app.engine.gpu.kernels.sample_out import ALIGNED, TOP, SampleOut
from app.engine.gpu.kernels.sampling_table import SamplingTable
from app.engine.gpu.resident_batch import ResidentBatch
from app.engine.gpu.step_inputs import StepInputs

_TILE_ROWS = 64
"""Query rows (tokens times heads that share keys) of one attention program."""
_MIN_TILE_TOKENS = 16
SCORED_ROWS = 64
"""Tokens of a prompt that are scored at once, padded to this number."""


class DeviceExecutor:
    """Computes the parts of steps. The only writer of the KV cache and of the resident rows."""

    def __init__(
        self,
        decoder: PagedDecoder,
        kernels: Kernels,
        caches: Items[Tensor],
        resident: ResidentBatch,
        *,
        max_rows: int,
        max_tokens: int,
        tokens: int = 0,
    ) -> None:
        """caches: of each cache group, [layer of the group, 2, block, ..].

        max_rows: largest decode step. tokens: number that every step is padded to, if shapes are fixed; else 0.
        """
        config, device = decoder.config, caches[0].device
        self.tokens = tokens
        self.max_rows = max_rows
        self.tile_tokens = max(_MIN_TILE_TOKENS, _TILE_ROWS // (config.n_heads // config.n_kv_heads))
        """Query tokens of an attention tile in steps with prompts."""
        self.decoder = decoder
        self.resident = resident
        self.caches = caches
        self.device = device
        self.drawn_2R = torch.empty(2, -(-max_rows // ALIGNED) * ALIGNED, dtype=torch.int32, device=device)
        """Resident rows that sample, and the lengths of their sequences; set before a step."""
        self.drawn_X = self.drawn_2R.view(-1)
        self.out = SampleOut.empty(max_rows, device)
        """Samples of the last step."""
        self._kernels = kernels
        self._order_S = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._ones_S = torch.ones_like(self._order_S)
        n_rows = max(max_tokens, max_rows)
        self._hidden_TD = torch.empty(n_rows, config.width, dtype=decoder.embedding.dtype, device=device)
        self._scoring = SamplingTable(1, config.vocab_size, device, logprobs=TOP)
        self._scored_row_S = torch.zeros(SCORED_ROWS, dtype=torch.int32, device=device)

    def clear_drawn(self) -> None:
        """Makes all rows that sample padding rows."""
        self.drawn_2R[0].fill_(self.resident.padding_row)
        self.drawn_2R[1].fill_(1)

    def prepare(self, group: int, clear_N: Tensor, sources_N: Tensor, targets_N: Tensor) -> None:
        """Zeroes blocks of a cache group, then copies blocks."""
        cache = self.caches[group]
        if len(clear_N):
            cache.index_fill_(2, clear_N.long(), 0)
        if len(targets_N):
            cache.index_copy_(2, targets_N.long(), cache.index_select(2, sources_N.long()))

    def decode(self, count: int, splits: int) -> None:
        """Forward pass of the last token of the first `count` rows. splits: at least the longest sequence's."""
        rows_T = self._padded(self.drawn_2R[0, :count], self.resident.padding_row)
        lengths_T = self._padded(self.drawn_2R[1, :count], 1)
        lookups = self._look_up(rows_T, lengths_T, None)
        rows_X, positions_X = lookups[0].tile_rows_T[:count], lookups[0].positions_T[:count]
        self._forward(lookups, (rows_X, self._order_S[:count], positions_X, self._ones_S[:count]), 1, splits)

    def prefill(self, inputs: StepInputs[Tensor], splits: int) -> None:
        """Forward pass of a step with prompts."""
        lookups = self._look_up(inputs.rows_T, inputs.lengths_T, inputs.tokens_T)
        self._forward(lookups, inputs[3:], self.tile_tokens, splits)

    def draw(self, count: int) -> None:
        """Samples for the first `count` tokens of the last forward pass."""
        rows_S, lengths_S = self.drawn_2R[:, :count]
        logits_SV = self.decoder.head(self._hidden_TD[:count])
        self._kernels.sample(logits_SV, rows_S, lengths_S, self.resident.table, self.out.first(count))

    def score(self, indices_X: Tensor, tokens_X: Tensor) -> Tensor:
        """Log-probability of a token after each of these tokens of the last forward pass; numbers of a SampleOut."""
        pieces = []
        for indices_S, tokens_S in zip(indices_X.split(SCORED_ROWS), tokens_X.split(SCORED_ROWS), strict=True):
            out = SampleOut.empty(SCORED_ROWS, indices_X.device)
            logits_SV = self.decoder.head(self._hidden_TD[indices_S.long()])
            row_S = self._scored_row_S
            self._kernels.sample(logits_SV, row_S, row_S, self._scoring, out, tokens_S)
            pieces.append(out.numbers_X)
        return torch.cat(pieces)

    def _look_up(self, rows_T: Tensor, lengths_T: Tensor, tokens_T: Tensor | None) -> list[RowLookup]:
        """One for each cache group: they differ in the slots."""
        return [self._kernels.look_up(rows_T, lengths_T, tokens_T, state) for state in self.resident.states]

    def _forward(self, lookups: list[RowLookup], tiles: tuple[Tensor, ...], tile_tokens: int, splits: int) -> None:
        row_X, start_X, position_X, length_X = tiles
        batches = [
            AttentionBatch(
                block_table_RB=state.block_table_RB,
                tile_row_X=row_X,
                tile_start_X=start_X,
                tile_position_X=position_X,
                tile_length_X=length_X,
                tile_tokens=tile_tokens,
                max_splits=splits,
            )
            for state in self.resident.states
        ]
        self.decoder(self.caches, lookups, batches, self._hidden_TD[: len(lookups[0].tokens_T)])

    def _padded(self, numbers_S: Tensor, filler: int) -> Tensor:
        extra = self.tokens - len(numbers_S)
        return numbers_S if extra <= 0 else torch.cat((numbers_S, numbers_S.new_full((extra,), filler)))
