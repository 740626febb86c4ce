"""Result of a step: sampled tokens and prompt scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.common.types import FinishReason, SampledEvent, Sequence, TokenScore


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
