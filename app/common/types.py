"""Data types of the engine: requests with their sampling parameters, events, sequences, batch plans.

Frozen structs cross the pipe between the API process and the engine process (msgpack); Sequence, Chunk and BatchPlan
stay in the engine process.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

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


def sampling_defaults(generation: Mapping[str, Any], path: Path) -> dict[str, float]:
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
    """Requests share cached prompt blocks only within a namespace."""

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


class StepReport(Struct, frozen=True, kw_only=True, array_like=True, tag="report"):
    """Results of one step; without events, the heartbeat of an idle engine."""

    events: tuple[SampledEvent, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    """Prompt log-probabilities; those of a request precede its first token event."""
    started: tuple[RequestStarted, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    counters: Counters = msgspec.field(default_factory=Counters)
    at: float = 0.0
    """Time of sending in monotonic seconds; both processes share this clock."""
    num_computed: int = 0
    """Tokens computed of all running requests: changes with every step that computes something."""
    work: tuple[tuple[str, float], ...] = ()
    """(request id, seconds): CPU time of grammars outside the steps since the last report."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Scheduling state of a request in the engine. Owned by the scheduler."""

    request: Request
    tokens: array[int]
    """Prompt and generated tokens, of type "q": the native kernels read them in place."""
    arrival: int
    """Sequence number of arrival: older requests have smaller ones; preemption does not change it."""
    n_prompt: int = field(init=False)
    """Tokens of the prompt."""
    max_length: int = field(init=False)
    """Most tokens that it can have."""
    num_computed: int = 0
    """Number of `tokens` whose keys and values are in the cache."""
    ahead: int = 0
    """Further tokens that steps in flight compute; the last may have been sampled on the device only."""
    blocks: tuple[array[int], ...] = ()
    """Cache blocks while it runs: an array for each cache group, all of one length, of type "i", since the native
    kernels read them in place. They are extended, and blocks that a window has passed become the null block; otherwise
    the tuple is replaced."""
    capacity: int = 0
    """Tokens that `blocks` have slots for; the allocator changes both."""
    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `tokens`, computed on demand."""
    num_registered: int = 0
    """Blocks that are registered in the prefix cache."""
    num_scored: int = 0
    """Prompt tokens whose log-probabilities were reported, not counting the first token."""
    preemptions: int = 0
    leader: Sequence | None = None
    """Sequence whose prompt blocks this one shares when it is first admitted; None from then on."""
    ended: bool = False
    """Finished, failed or cancelled."""
    waits_for_mask: bool = False
    """Steps skip it until its grammar's next mask is computed; the engine sets this before each plan."""

    def __post_init__(self) -> None:
        self.n_prompt = len(self.request.prompt)
        self.max_length = self.n_prompt + self.request.max_tokens

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def num_scheduled(self) -> int:
        """Tokens whose keys and values are in the cache or computed by steps in flight."""
        return self.num_computed + self.ahead

    @property
    def num_pending(self) -> int:
        """Tokens still to be scheduled; 1 means decode, of a token that was sampled or will be by a step in flight."""
        pending = len(self.tokens) - self.num_computed - self.ahead
        return pending if pending > 0 else 1

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log-probabilities were requested and not reported yet."""
        is_requested = self.request.prompt_logprobs is not None
        return max(0, self.n_prompt - 1 - self.num_scored) if is_requested else 0

    @property
    def max_cached_tokens(self) -> int:
        """Most `tokens` that may come from the prefix cache: the rows that are sampled or scored must be computed."""
        return self.num_scored if self.num_unscored else len(self.tokens) - 1

    @property
    def active_leader(self) -> Sequence | None:
        """The leader while it has not ended; None otherwise."""
        return None if self.leader is None or self.leader.ended else self.leader

    @property
    def has_prompt(self) -> bool:
        """Whether the keys and values of the whole prompt are in the cache."""
        return self.num_computed >= self.n_prompt


class Chunk(Struct, frozen=True, gc=False):
    """Computes tokens[start:stop] of a sequence; if stop is its end, samples new tokens."""

    sequence: Sequence
    start: int
    stop: int
    sample_from: int | None = None
    """Index in the sequence's tokens of the first row that is sampled, and with it all rows from there to `stop`.

    None: the last row alone. Otherwise it is the row of the last known token; the rows after it compute tokens that are
    expected to follow. The values that a dropped row has written stay in its slot until another row overwrites them.
    """

    @property
    def sampled_rows(self) -> range:
        """Indices in the sequence's tokens of the rows that are sampled."""
        if not self.samples:
            return range(0)
        return range(self.stop - 1 if self.sample_from is None else self.sample_from, self.stop)

    @property
    def samples(self) -> bool:
        """Whether rows of this chunk are sampled (with max_tokens 0 only to check that the logits are finite)."""
        return self.stop >= len(
            self.sequence.tokens
        )  # stable from plan() to commit(), even if other steps commit in between

    @property
    def cost(self) -> int:
        """Its share of the step's token budget: a scored row also goes through the LM head and counts twice."""
        return self.stop - self.start + len(self.scores)

    @property
    def scores(self) -> range:
        """Indices of the prompt tokens that this chunk scores, each with the logits of the row before it."""
        rows = range(self.start, min(self.stop, len(self.sequence.request.prompt) - 1))
        first = max(rows.start, self.sequence.num_scored)
        return range(first + 1, rows.stop + 1) if self.sequence.num_unscored else range(0)


class BatchPlan(Struct, frozen=True):
    """One step of the engine."""

    chunks: tuple[Chunk, ...]
    started: tuple[RequestStarted, ...] = ()
    clear: tuple[tuple[int, int], ...] = ()
    """(cache group, block): blocks to zero first. They have a new owner, and their old values may not be finite."""
    copies: tuple[tuple[int, int, int], ...] = ()
    """(cache group, from, to): blocks to copy after that and before the step."""


class SampledToken(Struct, frozen=True, gc=False):
    """Result of sampling one row of logits; `token` is None if the logits were not finite."""

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    is_undecided: bool = False
    """This may be the last token of a grammar: the sequence's next row shows how its text ends."""
    finish: FinishReason | None = None
    """The text ended with the previous token, and no further token was sampled."""
    failure: str = ""
    """User-facing reason why there is no token, if the model is not the cause."""


MASK_NOT_READY = SampledToken(None)
"""No token was sampled because the mask of the row's grammar is not ready: a later step computes the row again."""


class StepResult(Struct, frozen=True):
    """Results of a step by request id."""

    sampled: Mapping[str, tuple[SampledToken, ...]] = {}
    """For each request whose chunk samples: one entry for each of Chunk.sampled_rows, in their order."""
    scores: Mapping[str, tuple[TokenScore, ...] | None] = {}
    """For each request whose chunk scores prompt tokens; None if the logits were not finite."""
    failed: Mapping[str, str] = {}
    """Error messages of requests that could not be computed even alone; they have no other result."""
