"""The result of sampling one row of logits."""

from __future__ import annotations

from msgspec import Struct

from app.common.types import FinishReason


class SampledToken(Struct, frozen=True, gc=False):
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

DRAFTS_NOT_FINITE = SampledToken(None)
"""A row of a chunk with drafts is not finite, so none of its rows counts: it is computed again without drafts."""
