"""What the sampler reads for a row of logits (SamplingInput), and what a step returns (SampledToken, StepResult)."""

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
    """A request's parameters, its tokens so far, and what it may draw next."""

    params: SamplingParams
    tokens: Items[int]
    """Prompt and generated tokens, all of them ids of the vocabulary; the new one's position is their number."""
    n_prompt: int
    stop_ids: Items[int] = ()
    """Tokens that end the text: not drawn before min_tokens are there."""
    allowed: Tensor | None = None
    """The guide's bitmask, int32 [ceil(V / 32)]: bit i of word j is token 32 j + i. None allows every token."""

    @property
    def position(self) -> int:
        """Of the new token in its sequence."""
        return len(self.tokens)

    @property
    def generated(self) -> Items[int]:
        """Tokens behind the prompt."""
        return self.tokens[self.n_prompt :]

    @property
    def is_greedy(self) -> bool:
        """Whether only the best token is left, the lowest id among equals."""
        p = self.params
        return p.temperature == 0 or p.top_k == 1 or (p.top_p == 0 and p.typical_p == 1)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the sampler made of one row of logits; `token` is None where the logits were not finite."""

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    is_undecided: bool = False
    """This may be the last token of a grammar: the sequence's next row tells how its text ends."""
    finish: FinishReason | None = None
    """The text ended with the token before, and no other was drawn."""
    failure: str = ""
    """Why there is no token, for the user, where that is not the model's doing."""


LATE = SampledToken(None)
"""No token was drawn because the mask of the row's grammar is not there yet: the row is computed again."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, by request id."""

    drawn: Mapping[str, SampledToken] = field(default_factory=dict)
    """For each request whose chunk samples."""
    scores: Mapping[str, tuple[TokenScore, ...] | None] = field(default_factory=dict)
    """For each request whose chunk scores prompt tokens; None where the logits were not finite."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why there is nothing else of a request: it alone could not be computed."""


def take_in(sequence: Sequence, drawn: SampledToken) -> SampledEvent:
    """Makes the sequence one token longer, unless none was asked for or drawn; what there is to tell of it."""
    index, request = sequence.num_generated, sequence.request
    if request.max_tokens == 0:
        return SampledEvent(request.id, 0, None, finish=FinishReason.LENGTH)
    if drawn.finish:
        return SampledEvent(request.id, index, None, finish=drawn.finish)
    assert drawn.token is not None
    sequence.tokens.append(drawn.token)
    finish = None
    if drawn.token in request.stop_ids:
        finish = FinishReason.STOP
    elif sequence.num_generated >= request.max_tokens and not drawn.is_undecided:
        finish = FinishReason.LENGTH
    return SampledEvent(request.id, index, drawn.token, drawn.logprob, drawn.top, finish)
