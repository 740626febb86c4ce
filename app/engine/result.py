"""What a runner makes of a step: drawn tokens and scores. Pure: no torch, and nothing of it crosses the pipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.engine.types import TokenScore


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
