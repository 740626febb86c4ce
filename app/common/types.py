"""What crosses the pipe between API process and engine process: requests, sampling parameters, events, reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from math import isfinite
from typing import Any

import msgspec
from msgspec import Struct

from model.weights_version import File

SEED_BITS = 63
MAX_BIASES = 300
_PRESENCE, _FREQUENCY = (f"{name}_penalty must be from -2 to 2" for name in ("presence", "frequency"))


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
    """Applies to prompt and generated tokens."""
    presence_penalty: float = 0.0
    """Applies to generated tokens, as frequency_penalty does."""
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit); each id at most once."""
    min_tokens: int = 0
    """Tokens that end the text are not sampled before this many tokens are generated."""
    seed: int = 0
    choice: int = 0
    """Index among the n continuations of a prompt: each has its own random numbers, derived from the same seed."""
    logprobs: int | None = None
    """Number of most likely tokens to report with the sampled one."""

    def __post_init__(self) -> None:
        require(isfinite(self.temperature) and 0 <= self.temperature <= 10, "temperature must be from 0 to 10")
        require(0 <= self.top_k < 2**31, "top_k must be 0 (off) or above")
        require(isfinite(self.top_p) and 0 <= self.top_p <= 1, "top_p must be from 0 to 1")
        require(isfinite(self.min_p) and 0 <= self.min_p <= 1, "min_p must be from 0 to 1")
        require(isfinite(self.typical_p) and 0 < self.typical_p <= 1, "typical_p must be above 0 and at most 1")
        require(isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "repetition_penalty must be above 0")
        require(isfinite(self.presence_penalty) and abs(self.presence_penalty) <= 2, _PRESENCE)
        require(isfinite(self.frequency_penalty) and abs(self.frequency_penalty) <= 2, _FREQUENCY)
        if self.logit_bias:
            self._check_bias()
        require(0 <= self.min_tokens < 2**31, "min_tokens must be 0 or above")
        require(0 <= self.choice < 2**31, "choice must be 0 or above")
        require(-(2**SEED_BITS) <= self.seed < 2**SEED_BITS, "seed must fit 64 bits")
        require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs must be from 0 to 20")

    def _check_bias(self) -> None:
        require(len(self.logit_bias) <= MAX_BIASES, f"logit_bias may have at most {MAX_BIASES} entries")
        require(all(token >= 0 for token, _ in self.logit_bias), "logit_bias must name token ids of 0 or above")
        require(all(isfinite(x) and abs(x) <= 100 for _, x in self.logit_bias), "logit_bias must be from -100 to 100")
        require(len({token for token, _ in self.logit_bias}) == len(self.logit_bias), "logit_bias names an id twice")


def require(condition: bool, message: str) -> None:
    """Raises ValueError with `message` if `condition` is false."""
    if not condition:
        raise ValueError(message)


MODEL_DEFAULT_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any], path: File) -> dict[str, float]:
    """Sampling defaults of a generation_config.json, by the names of the request's fields. Raises ValueError.

    path: of the file, for error messages.
    """
    given = {key: generation[key] for key in MODEL_DEFAULT_FIELDS if generation.get(key) is not None}
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


class Request(Struct, frozen=True, kw_only=True):
    """One sequence to continue. When it is submitted again, `generated` are the tokens already delivered."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the text (EOS); they are counted, but have no text."""
    generated: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    """Input of the encoder, if the model has one."""
    prompt_logprobs: int | None = None
    """If set, report the log-probability of each prompt token but the first, and of this many most likely ones."""
    scored: int = 0
    """When it is submitted again, the number of prompt tokens whose log-probabilities were already delivered."""
    leader: str | None = None
    """Id of an earlier request with the same prompt, whose KV cache blocks this one shares (n above 1)."""
    grammar: str = ""
    """Grammar that constrains the text, in llguidance's dialect of Lark; empty for none."""
    cache_namespace: str = ""
    """Requests share cached prompt blocks, and what drafts are looked up in, only within a namespace."""
    speculate: bool = True
    """Whether steps may verify drafts of its tokens, if the engine speculates: the same tokens, sooner."""

    def __post_init__(self) -> None:
        require(len(self.prompt) > 0, "the prompt must have at least one token")
        require(min((*self.prompt, *self.source)) >= 0, "token ids must be 0 or above")
        require(self.max_tokens >= 0, "max_tokens must be 0 or above")
        require(self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "prompt_logprobs must be from 0 to 20")
        require(0 <= self.scored <= len(self.prompt), "scored must not be above the length of the prompt")
        require(len(self.generated) <= self.max_tokens, "generated must not be longer than max_tokens")


class FinishReason(StrEnum):
    """Why the engine ended a sequence; the API process handles stop strings, deadlines and cancellation."""

    STOP = "stop"
    LENGTH = "length"


class SampledEvent(Struct, frozen=True, array_like=True, gc=False):
    """One new token of a request, or its end."""

    request_id: str
    index: int
    """0 for the first generated token."""
    token: int | None
    """None if a request ends without one (max_tokens 0)."""
    logprob: float | None = None
    """From the raw logits, before temperature and filters; only if requested."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob), most likely first."""
    finish: FinishReason | None = None


TokenScore = tuple[float, tuple[tuple[int, float], ...]]
"""A token's log-probability, and the most likely alternatives as (id, log-probability)."""


class PromptScores(Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive prompt tokens."""

    request_id: str
    start: int
    """Index in the prompt of the first of these tokens; 1 or above, since the first token has no context."""
    tokens: tuple[TokenScore, ...]


class RequestStarted(Struct, frozen=True, array_like=True):
    """A request left the queue."""

    request_id: str
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


class RequestFailed(Struct, frozen=True, array_like=True):
    """A request failed; the message is for the user."""

    request_id: str
    message: str
    is_user_error: bool = False
    """Whether the client must change the request; otherwise it is a server error."""


class Counters(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The engine's state after a step."""

    running: int = 0
    waiting: int = 0
    blocks_active: int = 0
    blocks_total: int = 0
    preemptions: int = 0
    block_violations: int = 0
    """Failed consistency checks of the KV cache blocks."""
    drafted: int = 0
    """Draft tokens that steps have verified."""
    accepted: int = 0
    """Draft tokens that were right."""


class SpeculatedTokens(Struct, frozen=True, array_like=True):
    """Drafts of a request that a step has verified."""

    request_id: str
    drafted: int
    accepted: int
    """Drafts that were right; each saved a step."""


class StepReport(Struct, frozen=True, kw_only=True, array_like=True, tag="report"):
    """Results of one step; without events, the heartbeat of an idle engine."""

    events: tuple[SampledEvent, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    """Prompt log-probabilities; a request gets its own before its first token event."""
    started: tuple[RequestStarted, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    counters: Counters = msgspec.field(default_factory=Counters)
    at: float = 0.0
    """Time of sending in monotonic seconds; both processes share this clock."""
    num_computed: int = 0
    """Tokens computed of all running requests: changes with every step that computes something."""
    work: tuple[tuple[str, float], ...] = ()
    """(request id, seconds): CPU time of grammars outside the steps since the last report."""
    speculated: tuple[SpeculatedTokens, ...] = ()
