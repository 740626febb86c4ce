"""Sampling parameters, token masks and token counts of resident rows on the device.

triton/sampler.py samples by them. Nothing here waits for the device.

Shape legend: R resident rows (the last one is padding: greedy, never counted), W words of a row, M words of a bitmask
of the vocabulary, V vocabulary, N rows that change, X tokens of their histories.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.common.types import Request, SamplingParams
from app.engine.sampling import parameters as layout
from app.engine.sampling.parameters import pack_request
from app.engine.sampling.sampler import count_tokens


class SamplingTable:
    """The packed parameters of each resident row, its mask, its last token and token counts. Owns these tensors."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str, logprobs: int | None = None) -> None:
        """logprobs: number of most likely tokens that rows report before they are loaded."""
        self.vocab_size = vocab_size
        params = SamplingParams(temperature=0, logprobs=logprobs)
        padding = pack_request(Request(id="", prompt=(0,), max_tokens=1, params=params), 1)
        self.words_RW = torch.tensor(padding, dtype=torch.int32).to(device).repeat(rows, 1)
        self.masks_RM = torch.full((rows, layout.mask_words(vocab_size)), -1, dtype=torch.int32, device=device)
        """Bit i of word j is token 32 j + i; read for rows with fewer generated tokens than their word MIN_TOKENS."""
        self.last_token_R = torch.zeros(rows, dtype=torch.int32, device=device)
        """The last sampled token; 0 after a failed sample."""
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

    def load_masks(self, rows_N: Tensor, masks_X: Tensor) -> None:
        """Replaces the masks of rows; masks_X: one after the other."""
        self.masks_RM.index_copy_(0, rows_N.long(), masks_X.view(len(rows_N), -1))
