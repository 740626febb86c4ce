"""Sampling parameters of a request, checked on construction, and the defaults of generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from msgspec import Struct

SEED_BITS = 63
MAX_BIASES = 300
_PENALTY = "{}_penalty must be from -2 to 2"


class SamplingParams(Struct, frozen=True, kw_only=True):
    """Sampling parameters of a request. The constructor raises ValueError for values out of range."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    """Over prompt and generated tokens."""
    presence_penalty: float = 0.0
    """Over generated tokens, as frequency_penalty."""
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit); each id once."""
    min_tokens: int = 0
    """Tokens that end the text are not drawn before as many tokens are there."""
    seed: int = 0
    choice: int = 0
    """Which of the n continuations of a prompt this is: each draws its own numbers from the one seed."""
    logprobs: int | None = None
    """How many of the most likely tokens to report with the sampled one."""

    def __post_init__(self) -> None:
        require(isfinite(self.temperature) and 0 <= self.temperature <= 10, "temperature must be from 0 to 10")
        require(0 <= self.top_k < 2**31, "top_k must be 0 (off) or above")
        require(isfinite(self.top_p) and 0 <= self.top_p <= 1, "top_p must be from 0 to 1")
        require(isfinite(self.min_p) and 0 <= self.min_p <= 1, "min_p must be from 0 to 1")
        require(isfinite(self.typical_p) and 0 < self.typical_p <= 1, "typical_p must be above 0 and at most 1")
        require(isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty must be above 0")
        require(isfinite(self.presence_penalty) and abs(self.presence_penalty) <= 2, _PENALTY.format("presence"))
        require(isfinite(self.frequency_penalty) and abs(self.frequency_penalty) <= 2, _PENALTY.format("frequency"))
        require(len(self.logit_bias) <= MAX_BIASES, f"logit_bias may have at most {MAX_BIASES} entries")
        require(all(token >= 0 for token, _ in self.logit_bias), "logit_bias must name token ids of 0 or above")
        require(all(isfinite(x) and abs(x) <= 100 for _, x in self.logit_bias), "logit_bias must be from -100 to 100")
        require(len({token for token, _ in self.logit_bias}) == len(self.logit_bias), "logit_bias names an id twice")
        require(0 <= self.min_tokens < 2**31, "min_tokens must be 0 or above")
        require(0 <= self.choice < 2**31, "choice must be 0 or above")
        require(-(2**SEED_BITS) <= self.seed < 2**SEED_BITS, "seed must fit 64 bits")
        require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs must be from 0 to 20")


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` where `condition` does not hold."""
    if not condition:
        raise ValueError(message)


_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any], path: Path) -> dict[str, float]:
    """The values it sets, by the names of the request's fields. Raises ValueError for one outside its range.

    path: where it stands, for messages.
    """
    given = {key: generation[key] for key in _KEYS if generation.get(key) is not None}
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        for key, value in given.items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise ValueError(f"{key} must be a number, not {value!r:.40}")
        SamplingParams(**{**given, "top_k": max(0, int(given.get("top_k", 0)))})
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from None
    return {key: float(value) for key, value in given.items()}
