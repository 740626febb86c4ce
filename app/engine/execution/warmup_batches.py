"""Artificial sequences and grammars for warm-up steps and memory measurements.

They have no blocks: they write to the padding block.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from app.common.types import BatchPlan, Chunk, Request, SamplingParams, Sequence
from app.engine.sampling.sampler_io import SampledToken
from app.engine.scheduling.scheduler import StepLimits

_MANY = 32
_USUAL: dict[str, Any] = {"params": SamplingParams(temperature=0.8, top_p=0.9, logprobs=1)}
_COUNTED: dict[str, Any] = {"params": structs.replace(_USUAL["params"], repetition_penalty=1.1)}
_GREEDY: dict[str, Any] = {"params": SamplingParams(temperature=0)}
_COSTLY: dict[str, Any] = {
    "grammar": "any",
    "stop_ids": (0,),
    # Hot, so that it takes more tokens than a filter finds without a sort over all of them.
    "params": SamplingParams(
        temperature=10,
        top_k=2**31 - 1,
        typical_p=0.95,
        top_p=0.95,
        min_p=0.01,
        logit_bias=((0, 1.0),),
        min_tokens=2**31 - 1,
        logprobs=20,
    ),
}
_COSTLIEST = _COSTLY | {
    "prompt_logprobs": 20,
    "params": structs.replace(_COSTLY["params"], repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
}


def dummies(rows: int, length: int, *, start: int = 0, source: tuple[int, ...] = (), **asks: Any) -> BatchPlan:
    """A step of `rows` sequences, each of `length` tokens, from `start` on. asks: fields of their requests."""
    tokens, asks = [0] * length, _USUAL | asks
    return BatchPlan(tuple(Chunk(_sequence(place, tokens, source, **asks), start, length) for place in range(rows)))


def largest_step(limits: StepLimits, context: int) -> BatchPlan:
    """The step with the largest memory need among those that the device samples itself, for measurements.

    As many rows as may run, all of which draw, at the end of their context, and as many tokens as a step may have. The
    first alone has penalties, for which all tokens are uploaded: those of all rows at once, of 131,072 each, would fill
    memory that no real step fills.
    """
    return _spread(limits, context, [_COUNTED, *[_USUAL] * (limits.max_running - 1)], ())


def costliest_step(limits: StepLimits, context: int, *, source: tuple[int, ...] = ()) -> BatchPlan:
    """The same where the host samples, and requests use every option: grammars, and filters that sort whole rows.

    The first one's prompt is scored, too. Of many, the last one asks for nothing: then the rows of the others are
    copied, which takes more than one row does.
    """
    others = [_COSTLY] * (limits.max_running - 1)
    if limits.max_running > _MANY:
        others[-1] = _GREEDY
    return _spread(limits, context, [_COSTLIEST, *others], source)


def _spread(limits: StepLimits, context: int, asked: Items[dict[str, Any]], source: tuple[int, ...]) -> BatchPlan:
    """One sequence for each of `asked`; the first ones get as many tokens as possible."""
    tokens, spare, chunks = [0] * context, limits.tokens_per_step, []
    for place, asks in enumerate(asked):
        length = max(1, min(context, spare - (len(asked) - place - 1)))
        spare -= length
        chunks.append(Chunk(_sequence(place, tokens, source, **asks), context - length, context))
    return BatchPlan(tuple(chunks))


def _sequence(place: int, tokens: list[int], source: tuple[int, ...], **asks: Any) -> Sequence:
    """`tokens` is one unmodified list shared by all; the first sequence counts its last token as generated."""
    prompt = (0,) if place else tuple(tokens[:-1] or tokens)
    request = Request(id=f"dummy {place}", prompt=prompt, max_tokens=1, source=source, **asks)
    return Sequence(request=request, tokens=tokens, arrival=0)


class PermissiveGrammars:
    """A `TracksGrammars` of app/engine/execution/runner.py, whose masks cost as much as any grammar's."""

    def __init__(self, vocab_size: int) -> None:
        self._allowed_W = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)

    def allowed(self, sequences: Items[Sequence]) -> list[Tensor | SampledToken | None]:
        """All bits set."""
        return [self._allowed_W] * len(sequences)

    def follow(self, _sequences: Items[Sequence], drawn: list[SampledToken]) -> list[SampledToken]:
        """They lead nowhere."""
        return drawn
