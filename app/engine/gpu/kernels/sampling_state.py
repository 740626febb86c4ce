"""Sampling parameters, token masks and token counts of resident rows on the device, and the samples of a step.

triton/sampler.py samples from them. Nothing here waits for the device.

Shape legend: R resident rows (the last one is padding: greedy, never counted), W words of a row, M words of a bitmask
of the vocabulary, V vocabulary, N rows that change, X tokens of their histories, S sampled rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.common.types import Request, SamplingParams, TokenScore
from app.engine.sampling import parameters as layout
from app.engine.sampling.parameters import pack_request
from app.engine.sampling.sampled_token import SampledToken
from app.engine.sampling.sampler import count_tokens

TOP = 20
"""Most likely tokens reported for a sampled row."""
ALIGNED = 4
"""Alignment of kernel pointers, in 4-byte numbers (16 bytes): Triton compiles a separate variant of a kernel for every
set of aligned pointers, which would pause serving for about a second."""


_NUMBERS = 2 + 2 * TOP
"""Numbers of a sampled row."""


class SampleOut:
    """A step's samples in one int32 tensor, copied to the host at once; the views have fixed addresses.

    Log-probabilities are written only for rows that request them.
    """

    def __init__(self, numbers_X: Tensor, rows: int) -> None:
        """numbers_X: of `rows` rows, from empty() or first(), on any device."""
        self.numbers_X = numbers_X
        self._first: dict[int, SampleOut] = {}
        step = len(numbers_X) // _NUMBERS
        floats_X = numbers_X.view(torch.float32)
        self.tokens_S = numbers_X[:rows]
        """-1 if the logits were not finite."""
        self.logprob_S = floats_X[step : step + rows]
        """Of the sampled token."""
        self.top_ids_SN = numbers_X[2 * step : (2 + TOP) * step].view(-1, TOP)[:rows]
        """[S, 20]: the most likely first, the lower id first among ties; -1 beyond a small vocabulary."""
        self.top_logprobs_SN = floats_X[(2 + TOP) * step :].view(-1, TOP)[:rows]

    @classmethod
    def empty(cls, rows: int, device: torch.device | str) -> SampleOut:
        """Allocates outputs for steps of up to `rows` rows."""
        return cls(torch.full((_size(rows),), -1, dtype=torch.int32, device=device), rows)

    def first(self, rows: int) -> SampleOut:
        """Outputs for `rows` rows in the same memory: the same object each time."""
        if rows not in self._first:
            self._first[rows] = SampleOut(self.numbers_X[: _size(rows)], rows)
        return self._first[rows]

    def scores(self, counts: Items[int]) -> list[TokenScore | None]:
        """The first rows' log-probabilities, on the host; None without a token. counts: most likely tokens of each."""
        table = (x.tolist() for x in (self.tokens_S, self.logprob_S, self.top_ids_SN, self.top_logprobs_SN))
        return [
            None
            if token < 0
            else (own, tuple(pair for pair in zip(ids[:n], logprobs[:n], strict=True) if pair[0] >= 0))
            for n, (token, own, ids, logprobs) in zip(counts, zip(*table, strict=True), strict=False)
        ]


def samples_of(numbers_X: Tensor, rows: int, counts: Items[int | None]) -> list[SampledToken]:
    """The first rows' tokens, on the host. counts: as in SampleOut.scores(), or None for no log-probabilities at all.

    numbers_X: of a SampleOut of `rows` rows, on the host.
    """
    tokens = numbers_X[: len(counts)].tolist()
    if min(tokens, default=0) >= 0:
        samples = [*map(SampledToken, tokens)]  # faster than a comprehension
    else:
        samples = [SampledToken(token if token >= 0 else None) for token in tokens]
    if counts.count(None) == len(counts):
        return samples
    scores = SampleOut(numbers_X, rows).scores([count or 0 for count in counts])
    values = zip(samples, scores, counts, strict=True)
    return [sample if score is None or n is None else SampledToken(sample.token, *score) for sample, score, n in values]


def _size(rows: int) -> int:
    """Numbers of a SampleOut, each of whose tensors begins at a multiple of 16 bytes."""
    return -(-rows // ALIGNED) * ALIGNED * _NUMBERS


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
