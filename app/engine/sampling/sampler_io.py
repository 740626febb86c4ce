"""Input of the sampler for a row of logits (SamplingInput), and results of a step (SampledToken, StepResult)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.common.types import FinishReason, SampledEvent, SamplingParams, Sequence, TokenScore

if TYPE_CHECKING:  # the scheduler imports this module, and starts without torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """A request's parameters, its tokens so far, and the tokens that its grammar allows next."""

    params: SamplingParams
    tokens: Items[int]
    """Prompt and generated tokens, all of them ids of the vocabulary; their number is the position of the new token."""
    n_prompt: int
    stop_ids: Items[int] = ()
    """Tokens that end the text: not sampled before min_tokens are generated."""
    allowed: Tensor | None = None
    """The grammar's bitmask, int32 [ceil(V / 32)]: bit i of word j is token 32 j + i. None allows every token."""

    @property
    def position(self) -> int:
        """Position of the new token in its sequence."""
        return len(self.tokens)

    @property
    def generated(self) -> Items[int]:
        """Tokens after the prompt."""
        return self.tokens[self.n_prompt :]

    @property
    def is_greedy(self) -> bool:
        """Whether the filters leave only the most likely token, the lowest id among equals."""
        p = self.params
        return p.temperature == 0 or p.top_k == 1 or (p.top_p == 0 and p.typical_p == 1)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Result of sampling one row of logits; `token` is None if the logits were not finite."""

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    is_undecided: bool = False
    """This may be the last token of a grammar: the sequence's next row shows how its text ends."""
    finish: FinishReason | None = None
    """The text ended with the previous token, and no further token was sampled."""
    failure: str = ""
    """User-facing reason why there is no token, if the model is not the cause."""


MASK_NOT_READY = SampledToken(None)
"""No token was sampled because the mask of the row's grammar is not ready: a later step computes the row again."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of a step by request id."""

    sampled: Mapping[str, SampledToken] = field(default_factory=dict)
    """For each request whose chunk samples."""
    scores: Mapping[str, tuple[TokenScore, ...] | None] = field(default_factory=dict)
    """For each request whose chunk scores prompt tokens; None if the logits were not finite."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Error messages of requests that could not be computed even alone; they have no other result."""


def append_token(sequence: Sequence, sampled: SampledToken) -> SampledEvent:
    """Appends the token to the sequence, unless none was requested or sampled; returns the event to report."""
    index, request = sequence.num_generated, sequence.request
    if request.max_tokens == 0:
        return SampledEvent(request.id, 0, None, finish=FinishReason.LENGTH)
    if sampled.finish:
        return SampledEvent(request.id, index, None, finish=sampled.finish)
    assert sampled.token is not None
    sequence.tokens.append(sampled.token)
    finish = None
    if sampled.token in request.stop_ids:
        finish = FinishReason.STOP
    elif sequence.num_generated >= request.max_tokens and not sampled.is_undecided:
        finish = FinishReason.LENGTH
    return SampledEvent(request.id, index, sampled.token, sampled.logprob, sampled.top, finish)
