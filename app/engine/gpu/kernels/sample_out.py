"""Samples of a step on the device.

Shape legend: S sampled rows of a step, N most likely tokens, X flattened.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.common.types import TokenScore
from app.engine.sampling.sampled_token import SampledToken

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
