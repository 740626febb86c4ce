"""Data types of the engine: requests with their sampling parameters, events, sequences, batch plans.

Frozen structs cross the pipe between the API process and the engine process (msgpack); Sequence, Chunk and BatchPlan
stay in the engine process.
"""

from __future__ import annotations

import math
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
    prompt_logprobs: int | None = None
    """Report each prompt token's log-probability (but the first's), and this many of the most likely in its place."""
    scored: int = 0
    """Prompt tokens whose log-probabilities were delivered already, when a request is submitted again."""
    leader: str | None = None
    """A request with the same prompt, submitted before, whose keys and values this one takes over (n above 1)."""
    guide: str = ""
    """The grammar that the text must follow, in Lark as llguidance reads it; empty for none."""
    salt: str = ""
    """Requests share cached prompt blocks only under the same salt."""

    def __post_init__(self) -> None:
        require(len(self.prompt) > 0, "the prompt must hold at least one token")
        require(min((*self.prompt, *self.source)) >= 0, "token ids must be 0 or above")
        require(self.max_tokens >= 0, "max_tokens must be 0 or above")
        require(self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20, "prompt_logprobs must be from 0 to 20")
        require(0 <= self.scored <= len(self.prompt), "more prompt tokens were scored than there are")
        require(len(self.generated) <= self.max_tokens, "more tokens were generated than max_tokens allows")

    @property
    def max_length(self) -> int:
        """Tokens of the sequence when it is as long as it can get."""
        return len(self.prompt) + self.max_tokens


class FinishReason(StrEnum):
    """Why the engine ended a sequence; stop strings, deadlines and cancellation are the API process's."""

    STOP = "stop"
    LENGTH = "length"


class SampledEvent(Struct, frozen=True, array_like=True, gc=False):
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


TokenScore = tuple[float, tuple[tuple[int, float], ...]]
"""A token's own log-probability, and the most likely (id, log-probability) in its place."""


class PromptScores(Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens that stand behind one another."""

    request_id: str
    start: int
    """Place in the prompt of the first of these tokens; 1 or above, since nothing foretells the first token."""
    tokens: tuple[TokenScore, ...]


class RequestStarted(Struct, frozen=True, array_like=True):
    """A request left the queue."""

    request_id: str
    cached_tokens: int
    """Prompt tokens whose keys and values were found in the prefix cache."""


class RequestFailed(Struct, frozen=True, array_like=True):
    """A request that cannot go on; the message is for the user."""

    request_id: str
    message: str
    is_asked_for: bool = False
    """What the request asks for is the reason, not we."""


class Counters(Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """The engine's state after a step."""

    running: int = 0
    waiting: int = 0
    blocks_active: int = 0
    blocks_total: int = 0
    preemptions: int = 0
    block_violations: int = 0
    """Checks of the cache's blocks that found something wrong."""


class StepReport(Struct, frozen=True, kw_only=True, array_like=True, tag="report"):
    """What one step did. Sent also without events, as the heartbeat of an idle engine."""

    events: tuple[SampledEvent, ...] = ()
    scores: tuple[PromptScores, ...] = ()
    """Of a request's prompt, before its first token event."""
    started: tuple[RequestStarted, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    counters: Counters = msgspec.field(default_factory=Counters)
    at: float = 0.0
    """When it was sent: monotonic seconds, the same clock in both processes."""
    taken: tuple[str, ...] = ()
    """Requests that came into the engine's queue since the last report."""
    num_computed: int = 0
    """Of all running requests: changes with every step that computes something."""
    work: tuple[tuple[str, float], ...] = ()
    """(request id, seconds): CPU time of grammars outside the steps since the last report."""


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
    ahead: int = 0
    """Tokens behind those that steps in flight compute; the last may be one that only the device knows."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Chained hashes of the full blocks of `tokens`, made as far as they were needed."""
    num_published: int = 0
    num_scored: int = 0
    """Prompt tokens whose log-probabilities were reported, the first token not counted."""
    preemptions: int = 0
    leader: Sequence | None = None
    """Whose prompt this one takes over when it is first admitted; None from then on."""
    ended: bool = False
    """Finished, failed or cancelled."""
    waits_for_mask: bool = False
    """Steps leave it out until its grammar's next mask is there; the engine sets this before each plan."""

    @property
    def num_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_begun(self) -> int:
        """Tokens whose keys and values are in the cache, or will be when what is in flight is done."""
        return self.num_computed + self.ahead

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values are still to be begun; 1 means decode, of a token that is drawn or will be."""
        pending = len(self.tokens) - self.num_computed - self.ahead
        return pending if pending > 0 else 1

    @property
    def num_unknown(self) -> int:
        """Tokens that steps in flight draw: they come behind `tokens`."""
        return max(0, self.num_begun + 1 - len(self.tokens))

    @property
    def ends_in_flight(self) -> bool:
        """Whether its last token is being drawn, whatever token that will be."""
        return 0 < self.num_unknown >= self.request.max_tokens - self.num_generated

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log-probabilities are asked for and not reported yet."""
        asked = self.request.prompt_logprobs is not None
        return max(0, len(self.request.prompt) - 1 - self.num_scored) if asked else 0

    @property
    def num_reusable(self) -> int:
        """How many of `tokens` need no computing where their keys and values are there: no row that is looked at."""
        return self.num_scored if self.num_unscored else len(self.tokens) - 1

    @property
    def living_leader(self) -> Sequence | None:
        """The leader, as long as there is something to take over or to wait for."""
        return None if self.leader is None or self.leader.ended else self.leader

    @property
    def has_prompt(self) -> bool:
        """Whether the keys and values of the whole prompt are in the cache."""
        return self.num_computed >= len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Run tokens[start:stop] of a sequence. Where stop is the last token, a new one is drawn."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def samples(self) -> bool:
        """Whether a row of logits is drawn from after this chunk (with max_tokens 0 only to see that it is finite)."""
        return self.stop >= len(self.sequence.tokens)  # from plan() to commit(), whatever is committed in between

    @property
    def cost(self) -> int:
        """What it takes of a step's budget: a row that is scored goes through the head, and counts as a token more."""
        return self.stop - self.start + len(self.scores)

    @property
    def scores(self) -> range:
        """Places in the prompt of the tokens that get a log-probability from this chunk, each by the row before it."""
        rows = range(self.start, min(self.stop, len(self.sequence.request.prompt) - 1))
        first = max(rows.start, self.sequence.num_scored)
        return range(first + 1, rows.stop + 1) if self.sequence.num_unscored else range(0)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step of the engine."""

    chunks: tuple[Chunk, ...]
    started: tuple[RequestStarted, ...] = ()
    clear: tuple[int, ...] = ()
    """Blocks to be zeroed first: they have a new owner, and what they hold may not be finite."""
    copies: tuple[tuple[int, int], ...] = ()
    """(from, to): blocks to be copied after that and before the step."""
