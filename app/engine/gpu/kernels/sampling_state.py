"""Sampling parameters and token counts of resident rows on the device, and the samples of a step.

reference_operations.py and triton/sampler.py sample from them. Nothing here waits for the device.

Shape legend: R resident rows (the last one is padding: greedy, never counted), W words of a row, V vocabulary,
N rows that change, X tokens of their histories, S sampled rows of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.common.types import Request, SamplingParams
from app.engine.sampling import parameters as layout
from app.engine.sampling.parameters import RowParameters, count_tokens, pack_request
from app.engine.sampling.sampler import STAGE_NAMES

TOP = 20
"""Most likely tokens reported for a sampled row."""


@dataclass(frozen=True, slots=True)
class SampleOut:
    """A step's samples, in tensors with fixed addresses; log-probabilities only for rows that request them."""

    tokens_S: Tensor
    """int32; -1 if the logits were not finite."""
    logprob_S: Tensor
    """float32: of the sampled token."""
    top_ids_SN: Tensor
    """int32 [S, 20]: the most likely first, the lower id first among ties; -1 beyond a small vocabulary."""
    top_logprobs_SN: Tensor
    """float32."""

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> SampleOut:
        """Allocates outputs for steps of up to `rows` rows."""
        return cls(
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, device=device),
            torch.full((rows, TOP), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, TOP, device=device),
        )

    def first(self, rows: int) -> SampleOut:
        """Views of the first `rows` rows."""
        return SampleOut(
            self.tokens_S[:rows], self.logprob_S[:rows], self.top_ids_SN[:rows], self.top_logprobs_SN[:rows]
        )


class SamplingTable:
    """The packed parameters of each resident row, and the counts of its tokens. Owns these tensors."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        padding = pack_request(Request(id="", prompt=(0,), max_tokens=1, params=SamplingParams(temperature=0)), 1)
        self.words_RW = torch.tensor(padding, dtype=torch.int32).to(device).repeat(rows, 1)
        self.counts_RV = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        """Of the tokens of rows with penalties (count_tokens)."""

    def load(
        self,
        rows_N: Tensor,
        words_NW: Tensor,
        history_X: Tensor,
        history_rows_X: Tensor,
        history_is_generated_X: Tensor,
    ) -> None:
        """Loads rows for new requests. The history holds the tokens of counted requests, each with its resident row."""
        self.words_RW.index_copy_(0, rows_N.long(), words_NW)
        self.counts_RV.index_fill_(0, rows_N.long(), 0)
        if len(history_X):
            index_X = history_rows_X.long() * self.vocab_size + history_X.long()
            count_tokens(self.counts_RV.view(-1), index_X, history_is_generated_X)

    def parameters(self, rows_S: Tensor, positions_S: Tensor) -> RowParameters:
        """The parameters of the resident rows of a step, for all stages."""
        words_SW = self.words_RW.index_select(0, rows_S)
        return RowParameters(
            stages=STAGE_NAMES,
            may_wait=False,
            header_SX=words_SW[:, : layout.STOPS],
            stop_ids_SN=words_SW[:, layout.STOPS : layout.BIAS_IDS].long(),
            bias_ids_SN=words_SW[:, layout.BIAS_IDS : layout.BIASES].long(),
            biases_SN=words_SW[:, layout.BIASES :].view(torch.float64),
            positions_S1=positions_S[:, None],
            counts_SV=self.counts_RV.index_select(0, rows_S),
        )
