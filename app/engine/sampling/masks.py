"""Tokens that may not be drawn at all: -inf where a guide forbids them or where it is too early for the text to end.

Shape legend: S rows, V vocabulary, W words of 32 bits, N single tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from app.engine.sampling.sampling_input import SamplingInput

NOTHING = float("-inf")


def forbid(logits_SV: Tensor, rows: Items[SamplingInput]) -> None:
    """Masks in place. Where nothing but the end is left to a row, it may end before min_tokens."""
    guided = [i for i, row in enumerate(rows) if row.allowed is not None]
    if guided:
        words_SW = torch.stack([mask for row in rows if (mask := row.allowed) is not None]).to(logits_SV.device)
        index_S = torch.tensor(guided, device=logits_SV.device)
        logits_SV[index_S] = logits_SV[index_S].where(_bits(words_SW, logits_SV.shape[1]), NOTHING)
    vocab = logits_SV.shape[1]
    banned = [
        (i, token)
        for i, row in enumerate(rows)
        if len(row.tokens) - row.n_prompt < row.params.min_tokens
        for token in row.stop_ids
        if token < vocab
    ]
    if banned:
        _ban(logits_SV, *torch.tensor(banned, device=logits_SV.device).unbind(1))


def _bits(words_SW: Tensor, vocab: int) -> Tensor:
    """[S, vocab] truth of each bit, the lowest of each word first."""
    places = torch.arange(32, dtype=torch.int32, device=words_SW.device)
    return (words_SW[:, :, None] >> places & 1).bool().flatten(1)[:, :vocab]


def _ban(logits_SV: Tensor, row_N: Tensor, token_N: Tensor) -> None:
    before_N = logits_SV[row_N, token_N]
    logits_SV[row_N, token_N] = NOTHING
    hopeless_S = logits_SV.amax(-1) == NOTHING
    logits_SV[row_N, token_N] = before_N.where(hopeless_S[row_N], NOTHING)
