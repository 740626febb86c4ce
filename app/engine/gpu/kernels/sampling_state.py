"""What lies on the device of how each resident row is sampled, and where a step's draws are left.

Knows where words and counts lie, not how a token is drawn of them (static_sampler.py, triton/sampler.py). Nothing here
waits for the device.

Shape legend: R resident rows (the last one is of padding: greedy, never counted), W words of a row, V vocabulary,
N rows that change, X tokens of their histories, S sampled rows of a step.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from app.common.params import SamplingParams
from app.common.types import Request
from app.engine.gpu.kernels import sampling_layout as layout

TOP = 20
"""Most likely tokens that a draw reports."""


@dataclass(frozen=True, slots=True)
class SampleOut:
    """A step's draws, in tensors that stay where they are; log-probabilities only of rows that ask for them."""

    tokens_S: Tensor
    """int32; -1 where the logits were not finite."""
    logprob_S: Tensor
    """float32: of the token that was drawn."""
    top_ids_SN: Tensor
    """int32 [S, 20]: the most likely first, the lower id among equals; -1 behind the end of a small vocabulary."""
    top_logprobs_SN: Tensor
    """float32."""

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> SampleOut:
        """For steps of up to so many rows."""
        return cls(
            torch.full((rows,), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, device=device),
            torch.full((rows, TOP), -1, dtype=torch.int32, device=device),
            torch.zeros(rows, TOP, device=device),
        )

    def first(self, rows: int) -> SampleOut:
        """Views of the first rows."""
        return SampleOut(
            self.tokens_S[:rows], self.logprob_S[:rows], self.top_ids_SN[:rows], self.top_logprobs_SN[:rows]
        )


class SamplingTable:
    """The words of each resident row, and how often its tokens were there. Owns these tensors."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        nobody = layout.pack(Request(id="", prompt=(0,), max_tokens=1, params=SamplingParams(temperature=0)), 1)
        self.words_RW = torch.tensor(nobody, dtype=torch.int32).to(device).repeat(rows, 1)
        self.counts_RV: Tensor | None = None
        """int32: twice how often the token was generated, plus 1 where the prompt has it. None until with_counts()."""

    def words(self, request: Request) -> array[int]:
        """Of a request that fits: a row of words_RW."""
        return layout.pack(request, self.vocab_size)

    def fits(self, request: Request) -> bool:
        """Whether the request can be sampled on the device."""
        return layout.fits(request, self.vocab_size)

    def is_counted(self, request: Request) -> bool:
        """Whether load() needs the request's tokens."""
        return layout.is_counted(request)

    def with_counts(self) -> Tensor:
        """counts_RV, made when it is first asked for. A graph that was captured before knows nothing of it."""
        if self.counts_RV is None:
            shape = (len(self.words_RW), self.vocab_size)
            self.counts_RV = torch.zeros(shape, dtype=torch.int32, device=self.words_RW.device)
        return self.counts_RV

    def load(
        self,
        rows_N: Tensor,
        words_NW: Tensor,
        history_X: Tensor,
        history_rows_X: Tensor,
        history_is_generated_X: Tensor,
    ) -> None:
        """Rows get new owners. The history is the tokens of those that are counted, each with its resident row."""
        self.words_RW.index_copy_(0, rows_N.long(), words_NW)
        if len(history_X):
            self.with_counts()
        if self.counts_RV is None:
            return
        self.counts_RV.index_fill_(0, rows_N.long(), 0)
        if not len(history_X):
            return
        flat, generated_X = self.counts_RV.view(-1), history_is_generated_X.to(torch.int32)
        place_X = history_rows_X.long() * self.vocab_size + history_X.long()
        # Prompts first, when all is 0: the greatest of ones and zeros is the bit.
        flat.scatter_reduce_(0, place_X, 1 - generated_X, "amax")
        flat.index_add_(0, place_X, 2 * generated_X)
