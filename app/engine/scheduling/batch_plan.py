"""A sequence that is scheduled, the plan of a step, and the step's result. They stay in the engine process."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from msgspec import Struct

from app.common.types import Request, RequestStarted, TokenScore
from app.engine.sampling.sampled_token import SampledToken


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
    """Cache blocks while it runs: an array for each cache group, of type "i", since the native kernels read them in
    place. Groups with a window may have fewer (BlockAllocator). They are extended, and blocks that a window has passed
    become the null block; otherwise the tuple is replaced."""
    passed: list[int] = field(default_factory=list)
    """Number of null blocks at the start of each array of `blocks`."""
    claims: list[int] = field(default_factory=list)
    """Number of blocks of each cache group that it is sure to get, those in use included; 0 where it has them all."""
    capacity: int = 0
    """Tokens that all of `blocks` have slots for; the allocator changes both."""
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
    may_speculate: bool = field(init=False)
    """Whether its decodes may have drafts."""
    waits_for_mask: bool = False
    """Steps skip it until its grammar's next mask is computed; the engine sets this before each plan."""

    def __post_init__(self) -> None:
        self.n_prompt = len(self.request.prompt)
        self.max_length = self.n_prompt + self.request.max_tokens
        self.may_speculate = self.request.speculate

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
    drafts: tuple[int, ...] = ()
    """Tokens that are expected to follow the known ones. The chunk ends with them, and samples the rows of the last
    known token and of each draft. The values of a row that is dropped stay in its slot until another overwrites them.
    """

    @property
    def tokens(self) -> array[int]:
        """What it computes: known tokens, then drafts."""
        known = self.sequence.tokens[self.start : self.stop]
        return known + array("q", self.drafts) if self.drafts else known

    @property
    def sample_from(self) -> int:
        """Index in the sequence's tokens of the first row that is sampled, if the chunk samples."""
        return self.stop - 1 - len(self.drafts)

    @property
    def sampled_rows(self) -> range:
        """Indices in the sequence's tokens of the rows that are sampled."""
        return range(self.sample_from, self.stop) if self.samples else range(0)

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


def non_finite_chunks(finite: Items[int], chunks: Items[Chunk]) -> list[Chunk]:
    """Chunks with a row whose keys or values are not finite: 0 in `finite`, which has the rows of all chunks.

    A chunk of one row that is sampled does not count: its logits tell.
    """
    found, end = [], 0
    for chunk in chunks:
        start, end = end, end + chunk.stop - chunk.start
        if (end - start > 1 or not chunk.samples) and 0 in finite[start:end]:
            found.append(chunk)
    return found


class BatchPlan(Struct, frozen=True):
    """One step of the engine."""

    chunks: tuple[Chunk, ...]
    started: tuple[RequestStarted, ...] = ()
    clear: tuple[tuple[int, int], ...] = ()
    """(cache group, block): blocks to zero first. They have a new owner, and their old values may not be finite."""
    copies: tuple[tuple[int, int, int], ...] = ()
    """(cache group, from, to): blocks to copy after that and before the step."""


def without_ended(plan: BatchPlan) -> BatchPlan:
    """The plan without ended sequences; block clears and copies stay, because those blocks are not released yet."""
    chunks = tuple(chunk for chunk in plan.chunks if not chunk.sequence.ended)
    return BatchPlan(chunks, plan.started, plan.clear, plan.copies)


class StepResult(Struct, frozen=True):
    """Results of a step by request id."""

    sampled: Mapping[str, tuple[SampledToken, ...]] = {}
    """For each request whose chunk samples: one entry for each of Chunk.sampled_rows, in their order."""
    scores: Mapping[str, tuple[TokenScore, ...] | None] = {}
    """For each request whose chunk scores prompt tokens; None if the logits were not finite."""
    failed: Mapping[str, str] = {}
    """Error messages of requests that could not be computed even alone; they have no other result."""
