"""The nouns of the engine. Pure: no torch, no asyncio, no text.

Frozen structs cross the pipe between the API process and the engine process (msgpack); Sequence, Chunk and BatchPlan
stay in the engine process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
from msgspec import Struct

SEED_BITS = 63


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How a request's tokens are drawn. Raises ValueError outside the ranges, whoever builds it."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None
    """How many of the most likely tokens to report beside the chosen one."""

    def __post_init__(self) -> None:
        _require(_finite(self.temperature) and 0 <= self.temperature <= 10, "temperature must be from 0 to 10")
        _require(0 <= self.top_k < 2**31, "top_k must be 0 (off) or above")
        _require(_finite(self.top_p) and 0 <= self.top_p <= 1, "top_p must be from 0 to 1")
        _require(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p must be from 0 to 1")
        _require(-(2**SEED_BITS) <= self.seed < 2**SEED_BITS, "seed must fit 64 bits")
        _require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs must be from 0 to 20")


class Request(Struct, frozen=True, kw_only=True):
    """One sequence to continue. `generated` are tokens already delivered, when a request is submitted again."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the text (EOS); they count, but are no text."""
    generated: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    """What the encoder reads, where the model has one."""
    salt: str = ""
    """Requests share cached prompt blocks only under the same salt."""

    def __post_init__(self) -> None:
        _require(len(self.prompt) > 0, "the prompt must hold at least one token")
        _require(min((*self.prompt, *self.source)) >= 0, "token ids must be 0 or above")
        _require(self.max_tokens >= 0, "max_tokens must be 0 or above")
        _require(len(self.generated) <= self.max_tokens, "more tokens were generated than max_tokens allows")

    @property
    def max_length(self) -> int:
        """Tokens of the sequence when it is as long as it can get."""
        return len(self.prompt) + self.max_tokens


class FinishReason(StrEnum):
    """Why the engine ended a sequence; stop strings, deadlines and cancellation are the API process's."""

    STOP = "stop"
    LENGTH = "length"


class TokenEvent(Struct, frozen=True, array_like=True):
    """One new token of a request, or its end."""

    request_id: str
    index: int
    """0 for the first generated token."""
    token: int | None
    """None where a request ends without one (max_tokens 0)."""
    logprob: float | None = None
    """The model's own, before temperature and filters; only where asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob), most likely first."""
    finish: FinishReason | None = None


class Started(Struct, frozen=True, array_like=True):
    """A request left the queue."""

    request_id: str
    cached_tokens: int
    """Prompt tokens whose keys and values were found in the prefix cache."""


class Failed(Struct, frozen=True, array_like=True):
    """A request that cannot go on; the message is for the user."""

    request_id: str
    message: str


class Counters(Struct, frozen=True, kw_only=True):
    """The engine's state after a step."""

    running: int = 0
    waiting: int = 0
    blocks_active: int = 0
    blocks_cached: int = 0
    blocks_total: int = 0
    preemptions: int = 0


class StepReport(Struct, frozen=True, kw_only=True, tag="report"):
    """What one step did. Sent also without events, as the heartbeat of an idle engine."""

    events: tuple[TokenEvent, ...] = ()
    started: tuple[Started, ...] = ()
    failed: tuple[Failed, ...] = ()
    counters: Counters = msgspec.field(default_factory=Counters)


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request on its way through the engine. Owned by the scheduler."""

    request: Request
    tokens: list[int]
    """Prompt and generated tokens."""
    arrival: int
    """Older requests have smaller numbers, and keep them through preemption."""
    num_computed: int = 0
    """How many of `tokens` have their keys and values in the cache."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `tokens`, made as far as they were needed."""
    num_published: int = 0
    preemptions: int = 0

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 means decode."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """Run tokens[start:stop] of a sequence. Where stop is the last token, a new one is drawn."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether a row of logits is drawn from after this chunk (with max_tokens 0 only to see that it is finite)."""
        return self.stop == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step of the engine."""

    chunks: tuple[Chunk, ...]
    started: tuple[Started, ...] = ()
    clear: tuple[int, ...] = ()
    """Blocks to be zeroed first: they have a new owner, and what they hold may not be finite."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the sampler made of one row of logits; `token` is None where the logits were not finite."""

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def _finite(number: float) -> bool:
    return math.isfinite(number)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
