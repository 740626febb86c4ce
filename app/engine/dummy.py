"""Sequences of nobody, for steps that only have to be computed: warming up, measuring. Pure: no tensor.

They have no blocks: what they write lands where nobody reads.
"""

from __future__ import annotations

from typing import Any

from app.engine.limits import SchedulerLimits
from app.engine.params import SamplingParams
from app.engine.types import BatchPlan, Chunk, Request, Sequence


def dummies(rows: int, length: int, *, start: int = 0, source: tuple[int, ...] = ()) -> BatchPlan:
    """A step of `rows` sequences, each of `length` tokens, from `start` on."""
    tokens = [0] * length
    return BatchPlan(tuple(Chunk(_sequence(place, tokens, source), start, length) for place in range(rows)))


def largest_step(limits: SchedulerLimits, context: int, *, source: tuple[int, ...] = ()) -> BatchPlan:
    """The step that takes the most memory of all that the limits allow: a plan to measure by.

    As many rows as may run, all of which draw, at the end of their context, and as many tokens as a step may have. The
    first alone has penalties, for which all its tokens are told: those of all rows at once, of 131,072 each, would fill
    memory that no real step fills.
    """
    tokens, spare, chunks = [0] * context, limits.tokens_per_step, []
    for place in range(limits.max_running):
        length = max(1, min(context, spare - (limits.max_running - place - 1)))
        spare -= length
        sequence = _sequence(place, tokens, source, repetition_penalty=1.0 if place else 1.1)
        chunks.append(Chunk(sequence, context - length, context))
    return BatchPlan(tuple(chunks))


def _sequence(place: int, tokens: list[int], source: tuple[int, ...], **more: Any) -> Sequence:
    """`tokens` is one list for all, which nobody adds to."""
    params = SamplingParams(temperature=0.8, top_p=0.9, logprobs=1, **more)
    request = Request(id=f"dummy {place}", prompt=tuple(tokens), max_tokens=1, params=params, source=source)
    return Sequence(request=request, tokens=tokens, arrival=0)
