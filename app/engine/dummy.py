"""Sequences of nobody, for steps that only have to be computed: warming up, measuring. Pure: no tensor."""

from __future__ import annotations

from app.engine.params import SamplingParams
from app.engine.types import BatchPlan, Chunk, Request, Sequence


def dummies(rows: int, length: int, *, start: int = 0, source: tuple[int, ...] = ()) -> BatchPlan:
    """A step of `rows` sequences without blocks, of `length` tokens, from `start` on: written where nobody reads."""
    params = SamplingParams(temperature=0.8, top_p=0.9, logprobs=1)
    prompt = (0,) * length
    requests = [
        Request(id=f"dummy {i}", prompt=prompt, max_tokens=1, params=params, source=source) for i in range(rows)
    ]
    sequences = [Sequence(request=request, tokens=[*prompt], arrival=0) for request in requests]
    return BatchPlan(tuple(Chunk(sequence, start, length) for sequence in sequences))
