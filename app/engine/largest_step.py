"""The step that takes the most memory of all that the limits allow: a plan to measure by. Knows no tensors."""

from __future__ import annotations

from app.engine.limits import SchedulerLimits
from app.engine.params import SamplingParams
from app.engine.types import BatchPlan, Chunk, Request, Sequence


def largest_step(limits: SchedulerLimits, context: int, *, has_encoder: bool = False) -> BatchPlan:
    """As many rows as may run, all of which draw, at the end of their context, and as many tokens as a step may have.

    The sequences have no blocks: what they write lands where nobody reads.
    """
    prompt, spare, chunks = (0,) * context, limits.tokens_per_step, []
    for place in range(limits.max_running):
        length = max(1, min(context, spare - (limits.max_running - place - 1)))
        spare -= length
        chunks.append(Chunk(_sequence(place, prompt, has_encoder=has_encoder), context - length, context))
    return BatchPlan(tuple(chunks))


def _sequence(place: int, prompt: tuple[int, ...], *, has_encoder: bool) -> Sequence:
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, logprobs=1)
    source = (0,) if has_encoder else ()
    request = Request(id=f"measure {place}", prompt=prompt, max_tokens=1, params=params, source=source)
    return Sequence(request=request, tokens=list(prompt), arrival=0)
