"""The step that takes the most memory of all that the limits allow: a plan to measure by. Knows no tensors."""

from __future__ import annotations

from app.engine.limits import SchedulerLimits
from app.engine.params import SamplingParams
from app.engine.types import BatchPlan, Chunk, Request, Sequence


def largest_step(limits: SchedulerLimits, context: int, *, has_encoder: bool = False) -> BatchPlan:
    """As many rows as may run, all of which draw, at the end of their context, and as many tokens as a step may have.

    The sequences have no blocks: what they write lands where nobody reads. The first alone has penalties, for which
    all its tokens are told: those of all rows at once, of 131,072 each, would fill memory that no real step fills.
    """
    prompt, spare, chunks = (0,) * context, limits.tokens_per_step, []
    tokens = [*prompt]  # one list for all, which nobody adds to
    for place in range(limits.max_running):
        length = max(1, min(context, spare - (limits.max_running - place - 1)))
        spare -= length
        sequence = _sequence(place, prompt, tokens, has_encoder=has_encoder)
        chunks.append(Chunk(sequence, context - length, context))
    return BatchPlan(tuple(chunks))


def _sequence(place: int, prompt: tuple[int, ...], tokens: list[int], *, has_encoder: bool) -> Sequence:
    penalty = 1.0 if place else 1.1
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=penalty, logprobs=1)
    source = (0,) if has_encoder else ()
    request = Request(id=f"measure {place}", prompt=prompt, max_tokens=1, params=params, source=source)
    return Sequence(request=request, tokens=tokens, arrival=0)
