"""Sampling input of one row of logits."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from torch import Tensor

from app.common.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingInput:
    """A request's parameters, its tokens so far, and what it may draw next."""

    params: SamplingParams
    tokens: Items[int]
    """Prompt and generated tokens, all of them ids of the vocabulary; the new one's position is their number."""
    n_prompt: int
    stop_ids: Items[int] = ()
    """Tokens that end the text: not drawn before min_tokens are there."""
    allowed: Tensor | None = None
    """The guide's bitmask, int32 [ceil(V / 32)]: bit i of word j is token 32 j + i. None allows every token."""

    @property
    def position(self) -> int:
        """Of the new token in its sequence."""
        return len(self.tokens)

    @property
    def generated(self) -> Items[int]:
        """Tokens behind the prompt."""
        return self.tokens[self.n_prompt :]

    @property
    def is_greedy(self) -> bool:
        """Whether only the best token is left, the lowest id among equals."""
        p = self.params
        return p.temperature == 0 or p.top_k == 1 or (p.top_p == 0 and p.typical_p == 1)
