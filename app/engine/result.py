"""What a runner makes of a step: drawn tokens and scores. Pure: no torch, and nothing of it crosses the pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.engine.types import FinishReason, Sequence, TokenEvent, TokenScore


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the sampler made of one row of logits; `token` is None where the logits were not finite."""

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    complete: bool = False
    """The request's guide leaves nothing to follow this token: the text ends with it."""
    failure: str = ""
    """Why there is no token, for the user, where that is not the model's doing."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, by request id."""

    drawn: Mapping[str, Drawn] = field(default_factory=dict)
    """For each request whose chunk samples."""
    scores: Mapping[str, tuple[TokenScore, ...] | None] = field(default_factory=dict)
    """For each request whose chunk scores prompt tokens; None where the logits were not finite."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Why there is nothing else of a request: it alone could not be computed."""


def take_in(sequence: Sequence, drawn: Drawn) -> TokenEvent:
    """Makes the sequence one token longer, but where none was asked for; what there is to tell of it."""
    index, request = sequence.num_generated, sequence.request
    if request.max_tokens == 0:
        return TokenEvent(request.id, 0, None, finish=FinishReason.LENGTH)
    assert drawn.token is not None
    sequence.tokens.append(drawn.token)
    finish = None
    if drawn.complete or drawn.token in request.stop_ids:
        finish = FinishReason.STOP
    elif sequence.num_generated >= request.max_tokens:
        finish = FinishReason.LENGTH
    return TokenEvent(request.id, index, drawn.token, drawn.logprob, drawn.top, finish)
