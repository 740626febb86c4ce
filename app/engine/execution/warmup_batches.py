"""Artificial sequences and grammars for warm-up steps and memory measurements.

They have no blocks: they write to the padding block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from msgspec import structs

from app.common.types import Request, SamplingParams
from app.engine.sampling.sampled_token import SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence
from app.engine.scheduling.scheduler import StepLimits
from model.number_formats import Array

_TYPICAL: dict[str, Any] = {"params": SamplingParams(temperature=0.8, top_p=0.9, logprobs=1)}
_PENALIZED: dict[str, Any] = {"params": structs.replace(_TYPICAL["params"], repetition_penalty=1.1)}
_COSTLY: dict[str, Any] = {
    "grammar": "any",
    "stop_ids": (0,),
    # A high temperature, so that filters need more tokens than they find without sorting the whole row.
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


def dummies(rows: int, length: int, *, start: int = 0, source: tuple[int, ...] = (), **fields: Any) -> BatchPlan:
    """A step of `rows` sequences that computes tokens start:length of each. fields: fields of their requests."""
    tokens, fields = array("q", [0]) * length, _TYPICAL | fields
    return BatchPlan(tuple(Chunk(_sequence(index, tokens, source, **fields), start, length) for index in range(rows)))


def verifying(rows: int, *, source: tuple[int, ...] = ()) -> BatchPlan:
    """A step of one sequence that decodes, with drafts: so many rows."""
    sequence = _sequence(0, array("q", [0]), source, **_TYPICAL)
    return BatchPlan((Chunk(sequence, 0, rows, (0,) * (rows - 1)),))


def largest_step(limits: StepLimits, context: int) -> BatchPlan:
    """The step with the largest memory need of a backend that samples and scores on the device, for measurements.

    It has the most rows that may run, all sampling at the end of their context, and the most tokens that a step may
    have. Only the first row has penalties, which upload all of its tokens: uploads for all rows, 131,072 each,
    would need memory that no real step needs. Its prompt is scored as well.
    """
    first = _PENALIZED | {"prompt_logprobs": 20}
    return _spread(limits, context, [first, *[_TYPICAL] * (limits.max_running - 1)], ())


def costliest_step(limits: StepLimits, context: int, *, source: tuple[int, ...] = ()) -> BatchPlan:
    """The same for a backend that samples on the host, with every option: grammars, and filters that sort whole rows.

    The prompt of the first sequence is scored as well.
    """
    return _spread(limits, context, [_COSTLIEST, *[_COSTLY] * (limits.max_running - 1)], source)


def _spread(limits: StepLimits, context: int, requests: Items[dict[str, Any]], source: tuple[int, ...]) -> BatchPlan:
    """One sequence for each entry of `requests`; the first ones get as many tokens as possible."""
    tokens, spare, chunks = array("q", [0]) * context, limits.tokens_per_step, []
    for index, fields in enumerate(requests):
        length = max(1, min(context, spare - (len(requests) - index - 1)))
        spare -= length
        chunks.append(Chunk(_sequence(index, tokens, source, **fields), context - length, context))
    return BatchPlan(tuple(chunks))


def _sequence(index: int, tokens: array[int], source: tuple[int, ...], **fields: Any) -> Sequence:
    """`tokens` is one array that all sequences share; in the first sequence its last token counts as generated."""
    prompt = (0,) if index else tuple(tokens[:-1] or tokens)
    request = Request(id=f"dummy {index}", prompt=prompt, max_tokens=1, source=source, **fields)
    return Sequence(request=request, tokens=tokens, arrival=0)


class PermissiveGrammars:
    """A `MaskProvider` of app/engine/execution/runner.py whose masks allow every token at the cost of real ones."""

    def __init__(self, vocab_size: int) -> None:
        self._allowed_W = np.full(-(-vocab_size // 32), -1, np.int32)

    def allowed(self, sequences: Items[Sequence]) -> list[Array | SampledToken | None]:
        """Masks that allow every token."""
        return [self._allowed_W] * len(sequences)

    def allowed_after(self, _sequence: Sequence, drafts: tuple[int, ...]) -> list[Array]:
        """Masks that allow every token."""
        return [self._allowed_W] * len(drafts)

    def accept_tokens(self, _sequences: Items[Sequence], sampled: list[SampledToken]) -> list[SampledToken]:
        """Returns the tokens unchanged."""
        return sampled

    def accept_drafts(
        self, _sequence: Sequence, _drafts: tuple[int, ...], rows: tuple[SampledToken, ...]
    ) -> tuple[SampledToken, ...]:
        """Returns the tokens unchanged."""
        return rows
