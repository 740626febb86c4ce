"""Scores a generated text with model/nn/reference.py in float32 on the CPU.

The engine's own tokens are read in one pass, and each is held against the logits before it: one token that a tie
decided otherwise would make the rest of a free run incomparable.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.common.types import Request
from app.engine.sampling.sampler import sample
from app.engine.sampling.sampler_io import SamplingInput
from model.nn.reference import logits
from model.nn.transformer import Decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """On one text."""

    tokens: int
    off: int
    """Tokens that the oracle would not have taken."""
    gap: float
    """By how much at most its logit is below the one that the oracle would have taken, where all was greedy."""
    difference: float
    """The largest one between log-probabilities."""


def judge(decoder: Decoder, request: Request, tokens: tuple[int, ...], logprobs: tuple[float | None, ...]) -> Verdict:
    """`decoder` is in float32, on the CPU, and holds the same numbers as the engine's."""
    prompt = len(request.prompt)
    history = [*request.prompt, *tokens]
    logits_SV = logits(decoder, history)[prompt - 1 : -1]
    rows = [SamplingInput(request.params, history[: prompt + i], prompt) for i in range(len(tokens))]
    wanted = [_drawn(row_V, row) for row_V, row in zip(logits_SV, rows, strict=True)]
    own_S = torch.log_softmax(logits_SV, -1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    told = [float("nan") if logprob is None else logprob for logprob in logprobs]
    off = [i for i, token in enumerate(tokens) if token != wanted[i]]
    gaps = [float(logits_SV[i, wanted[i]] - logits_SV[i, tokens[i]]) for i in off]
    return Verdict(
        tokens=len(tokens),
        off=len(off),
        gap=max(gaps, default=0.0),
        difference=float((torch.tensor(told) - own_S).abs().max()),
    )


def _drawn(logits_V: Tensor, row: SamplingInput) -> int:
    """Row by row: the oracle of a batch must not be one."""
    (drawn,) = sample(logits_V[None], [row])
    assert drawn.token is not None
    return drawn.token
