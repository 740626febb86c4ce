"""Scheduler: plans which sequences run in the next step, and commits the results of steps.

    waiting --admit--> running --last token--> ended
       ^                  |
       +---- preempt -----+      blocks released (full ones stay cached), tokens kept, recomputed later

A step is a list of chunks under a token budget: decodes first, so that a long prompt does not delay the next token of
running sequences; then chunked prefills, in small chunks while decodes wait for them; then new requests by arrival.
Admission allocates the blocks of all tokens known so far, so only decodes grow, and when no block is left the youngest
sequence is preempted. (Beside other layers, those with a window get their blocks chunk by chunk: BlockAllocator.) A
sequence that was preempted `max_preemptions` times is readmitted with all the blocks it can ever need and is never
preempted again, so every sequence finishes.

A decode may verify drafts, tokens that are expected to follow (app/engine/speculation): if a step consists of decodes,
the token budget has room, and no block must be evicted for them.

plan_ahead() plans the step after one that is still running. It counts tokens that are not sampled yet, preempts no
sequence, and leaves out sequences that certainly end in the running step. A sequence that ends unexpectedly has
computed one extra token, which is discarded.

The request queue of the API process decides which request is next. Only a few wait here, by arrival, and preempted ones
before them.
"""

from __future__ import annotations

import logging
from array import array
from bisect import insort
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from app.common.model_version import Version
from app.common.types import (
    Counters,
    FinishReason,
    PromptScores,
    Request,
    RequestFailed,
    RequestStarted,
    SampledEvent,
    SpeculatedTokens,
    StepReport,
)
from app.engine.sampling.sampled_token import DRAFTS_NOT_FINITE, MASK_NOT_READY, SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence, StepResult
from app.engine.scheduling.block_allocator import BlockAllocator
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.steps_in_flight import StepsInFlight

_PROMPT_TOKENS_PER_DECODE = 4
"""Prompt tokens that are always allowed per decode: a step of many decodes takes long in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Limits of one step."""

    tokens_per_step: int
    max_running: int
    max_preemptions: int = 4
    prompt_tokens_with_decodes: int | None = None
    """Most prompt tokens in a step that also decodes; None: as many as fit."""
    prompt_tokens_shared: int | None = None
    """Most prompt tokens in any step while API keys are in use: another key's first token may wait for that step."""

    def __post_init__(self) -> None:
        assert self.tokens_per_step >= self.max_running, "each running request takes a token of a step"

    def prompt_budget(self, n_decodes: int, *, is_shared: bool = False) -> int:
        """Prompt tokens that fit into a step with `n_decodes` decodes."""
        budget = self.tokens_per_step - n_decodes
        if is_shared and self.prompt_tokens_shared is not None:
            budget = min(budget, self.prompt_tokens_shared)
        if not n_decodes or self.prompt_tokens_with_decodes is None:
            return budget
        return min(budget, max(self.prompt_tokens_with_decodes, _PROMPT_TOKENS_PER_DECODE * n_decodes))


class DraftPlanner(Protocol):
    """Decides which drafts a step verifies: Speculation, or a fake in tests."""

    def drafts(self, sequences: Items[Sequence], room: Items[int], most_rows: int, /) -> Items[tuple[int, ...]]:
        """The drafts of each sequence that decodes in a step; none at all: an empty list.

        room: the most drafts that each may have. most_rows: of the step, the known tokens of `sequences` included.
        """
        ...

    def forget(self, sequence: Sequence, /) -> None:
        """The sequence has ended."""
        ...


def _leader_of(request: Request, older: Iterable[Sequence]) -> Sequence | None:
    """The leader, if its prompt, source and namespace are equal; otherwise its keys and values would be wrong."""
    facts = (request.leader, request.prompt, request.source, request.cache_namespace)
    known = ((s, s.request) for s in older)
    return next((s for s, r in known if facts == (r.id, r.prompt, r.source, r.cache_namespace)), None)


_log = logging.getLogger("inkstream")
_UNVERSIONED = Version("")
_NOT_SAMPLED = SampledToken(None)
_NO_ROWS = (_NOT_SAMPLED,)
"""Results of a chunk that samples no row."""
NOT_FINITE = "the model's output for this request is not finite"


class Scheduler:
    """Owns the sequences and the block pools."""

    def __init__(
        self,
        limits: StepLimits,
        *pools: BlockPool,
        version: Version = _UNVERSIONED,
    ) -> None:
        """pools: see BlockAllocator."""
        self.limits = limits
        self.pools = pools
        self.waiting: list[Sequence] = []  # preempted ones, the last preempted first; then the others by arrival
        self.running: list[Sequence] = []  # by arrival
        self.preemptions = self.block_violations = self.drafted = self.accepted = 0
        self._arrivals = 0
        self.draft_planner: DraftPlanner | None = None
        """Without it no step has drafts."""
        self._in_flight = StepsInFlight(pools)
        self._allocator = BlockAllocator(pools, self._in_flight, version, tokens_per_step=limits.tokens_per_step)

    @property
    def pool(self) -> BlockPool:
        """The blocks of the cache group that has most."""
        return self._allocator.largest

    @property
    def has_work(self) -> bool:
        """Whether there is a step to plan or to commit."""
        return bool(self.waiting or self.running or self._in_flight)

    @property
    def counters(self) -> Counters:
        """Counters for the report of a step."""
        return Counters(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_active=self._allocator.active,
            blocks_total=self._allocator.largest.total,
            preemptions=self.preemptions,
            block_violations=self.block_violations,
            drafted=self.drafted,
            accepted=self.accepted,
        )

    def add(self, request: Request) -> None:
        """Adds a new request behind all others. The caller has checked that the cache can hold it."""
        self._arrivals += 1
        tokens = array("q", request.prompt + request.generated)
        sequence = Sequence(request=request, tokens=tokens, arrival=self._arrivals, num_scored=request.scored)
        # Prompt log-probabilities need the sequence's own rows, so it cannot take over a leader's prompt.
        if request.leader and not sequence.num_unscored:
            sequence.leader = _leader_of(request, chain(self.waiting, self.running))
        self.waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Drops a request and releases its blocks once no step uses them; does nothing if it has already ended."""
        for sequence in [s for s in self.running if s.request.id == request_id]:
            self._end(sequence)
        for sequence in [s for s in self.waiting if s.request.id == request_id]:
            self.waiting.remove(sequence)
            self._mark_ended(sequence)

    def plan(self) -> BatchPlan:
        """Plans the next step; the plan has no chunks if all sequences wait for masks.

        commit() must follow, with or without mark_launched() before it.
        """
        assert not self._in_flight, "a sequence in flight must not be preempted"
        preemptions = self.preemptions
        while self._allocator.is_overdrawn and (victim := self._youngest()):
            self._preempt(victim)
        chunks = self._plan_decodes()
        n_decodes = len(chunks)
        # Admit nothing in a step that preempted.
        started = self._fill(chunks, may_admit=self.preemptions == preemptions)
        if self.draft_planner and 0 < len(chunks) == n_decodes:
            self._add_drafts(chunks, self.draft_planner)
        return BatchPlan(tuple(chunks), started, *self._allocator.take_preparations())

    def plan_ahead(self) -> BatchPlan | None:
        """Plans the step after those in flight; None if there is nothing to compute or too few blocks are free."""
        chunks, growing = self._decodes_ahead()
        if not self._allocator.can_extend(growing):
            return None
        for sequence in growing:
            self._allocator.extend(sequence)
        started = self._fill(chunks)
        plan = BatchPlan(tuple(chunks), started, *self._allocator.take_preparations())
        return plan if plan.chunks else None

    def mark_launched(self, plan: BatchPlan) -> None:
        """Marks the step as in flight, so that plan_ahead() counts its results; called in planning order."""
        self._in_flight.add(plan)

    def commit(self, plan: BatchPlan, result: StepResult) -> StepReport:
        """Applies the step's results, except for sequences that have ended in the meantime.

        Rows of a sequence are accepted in order, until one of them ends the sequence, has no mask, or samples another
        token than its draft; the others are dropped: their tokens, and their keys and values, are not part of the
        sequence.
        """
        self._in_flight.complete(plan)
        events, scores, failed = list[SampledEvent](), list[PromptScores](), list[RequestFailed]()
        speculated = list[SpeculatedTokens]()
        sampled_of, block_size = result.sampled.get, self.pools[0].block_size
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.ended:
                continue
            request, tokens = sequence.request, sequence.tokens
            rows = sampled_of(request.id, _NO_ROWS)
            sampled = rows[0]
            if sampled is DRAFTS_NOT_FINITE:
                self._discard(chunk)
                continue
            while True:
                token, finish = sampled.token, sampled.finish
                length = len(tokens)  # the sampled row is the row of the last token
                if token is None or request.prompt_logprobs is not None:
                    self._commit_checks(chunk, sampled, result, scores, failed)
                    if sequence.ended or (token is None and not finish):
                        break
                else:  # most rows: a token and nothing else
                    sequence.num_computed = length
                    if length // block_size > sequence.num_registered:
                        self._allocator.register_prefix(sequence)
                        self._allocator.release_before(sequence, length)
                if token is not None:
                    if token in request.stop_ids:
                        finish = FinishReason.STOP
                    elif length + 1 >= sequence.max_length and not sampled.is_undecided:
                        finish = FinishReason.LENGTH
                    if finish and not request.max_tokens:
                        token, finish, sampled = None, FinishReason.LENGTH, _NOT_SAMPLED
                    else:
                        tokens.append(token)
                index = length - sequence.n_prompt
                events.append(SampledEvent(request.id, index, token, sampled.logprob, sampled.top, finish))
                is_last = length >= chunk.stop
                if finish or not (is_last or token == chunk.drafts[length - chunk.stop]):
                    self._allocator.drop_rows(sequence, length, chunk.stop)
                    if finish:
                        self._end(sequence)
                    break
                if is_last:
                    break
                sampled = rows[length - chunk.stop]  # the last row ends where the chunk does
            if chunk.drafts:
                n_drafted, n_accepted = len(chunk.drafts), length - 1 - chunk.sample_from
                self.drafted += n_drafted
                self.accepted += n_accepted
                speculated.append(SpeculatedTokens(request.id, n_drafted, n_accepted))
        return StepReport(
            events=tuple(events),
            scores=tuple(scores),
            failed=tuple(failed),
            counters=self.counters,
            speculated=tuple(speculated),
        )

    def _commit_checks(
        self,
        chunk: Chunk,
        sampled: SampledToken,
        result: StepResult,
        scores: list[PromptScores],
        failed: list[RequestFailed],
    ) -> None:
        """Commits a row except for its token: part of a prompt, scores, an end, a failure, or a late mask."""
        sequence, request_id, positions = chunk.sequence, chunk.sequence.request.id, chunk.scores
        if request_id in result.failed:
            failed.append(self._fail(sequence, result.failed[request_id]))
            return
        if sampled is MASK_NOT_READY:  # a later step computes the row again, with the same result
            return
        scored = result.scores[request_id] if positions else ()
        is_sampled = sampled is not _NOT_SAMPLED
        has_result = sampled.token is not None or sampled.finish or sampled.failure
        if scored is None or (is_sampled and not has_result):
            failed.append(self._fail(sequence, NOT_FINITE))
            return
        if sampled.failure:
            failed.append(RequestFailed(request_id, sampled.failure, is_user_error=True))
            self._end(sequence)
            return
        if not sampled.finish:  # those logits were not checked for being finite
            sequence.num_computed = len(sequence.tokens) if is_sampled else chunk.stop
            self._allocator.register_prefix(sequence)
        if scored:
            scores.append(PromptScores(request_id, positions.start, scored))
            sequence.num_scored += len(scored)
        self._allocator.release_before(sequence, sequence.num_computed)

    def violations(self) -> list[str]:
        """Violated invariants of the block accounting; tests check them after every step."""
        return self._allocator.violations(chain(self.running, self.waiting))

    def check_blocks(self) -> None:
        """Counts and logs violations, and changes nothing else."""
        if found := self.violations():
            self.block_violations += 1
            _log.error("cache block accounting is wrong (%d violations): %s", len(found), "; ".join(found[:3]))

    def _plan_decodes(self) -> list[Chunk]:
        chunks = []
        for sequence in list(self.running):
            start = sequence.num_computed + sequence.ahead
            if sequence.waits_for_mask or len(sequence.tokens) - start > 1:
                continue
            # Most rows cross no block border. An older sequence may have preempted this one, which has no blocks then.
            if sequence.capacity > start or (sequence.capacity and self._grow(sequence)):
                chunks.append(Chunk(sequence, start, start + 1))
        return chunks

    def _decodes_ahead(self) -> tuple[list[Chunk], list[Sequence]]:
        """Decodes of the sequences that have a next token to compute after the steps in flight; which need a block."""
        chunks, growing = list[Chunk](), list[Sequence]()
        leaders = {sequence.leader for sequence in self.waiting}
        for sequence in self.running:
            start = sequence.num_computed + sequence.ahead
            n_unsampled = start + 1 - len(sequence.tokens)  # tokens that steps in flight sample; below 0 in a prompt
            if n_unsampled < 0 or sequence.waits_for_mask or (n_unsampled and start + 1 >= sequence.max_length):
                continue
            # A leader skips one step, so that its followers share the prompt while no step writes to its blocks.
            if leaders and n_unsampled and sequence in leaders and not sequence.has_prompt:
                continue
            chunks.append(Chunk(sequence, start, start + 1))
            if sequence.capacity <= start:
                growing.append(sequence)
        return chunks, growing

    def _fill(self, chunks: list[Chunk], *, may_admit: bool = True) -> tuple[RequestStarted, ...]:
        """Adds as many prompt tokens as fit to a plan of decodes: of running prompts, then of the admitted ones that it
        returns.

        Namespaces that have nothing running yet are admitted first, into half of the budget: the long prompts of one
        namespace must not delay a short one of another.
        """
        if len(chunks) == len(self.running) and not self.waiting:
            return ()
        prefilling = [s for s in self.running if s.num_pending > 1 and not s.waits_for_mask]
        is_shared = any(s.request.cache_namespace for s in chain(self.waiting, prefilling))
        budget = self.limits.prompt_budget(len(chunks), is_shared=is_shared)
        started: list[RequestStarted] = []
        if may_admit and prefilling:
            present = {sequence.request.cache_namespace for sequence in self.running}
            budget -= self._admit_some(budget // 2, chunks, started, present)
        budget -= self._add_prefill_chunks(budget, prefilling, chunks)
        if may_admit:
            self._admit_some(budget, chunks, started)
        return tuple(started)

    def _add_drafts(self, chunks: list[Chunk], planner: DraftPlanner) -> None:
        """Adds drafts to the decodes of a step, where free blocks hold them: none is evicted, no sequence preempted."""
        sequences = [chunk.sequence for chunk in chunks]
        room = [
            sequence.max_length - len(sequence.tokens) - 1 if sequence.may_speculate else 0 for sequence in sequences
        ]
        for index, drafts in enumerate(planner.drafts(sequences, room, self.limits.tokens_per_step)):
            if not drafts:
                continue
            sequence, start, stop = chunks[index].sequence, chunks[index].start, chunks[index].stop
            self._allocator.extend_with_free(sequence, stop + len(drafts), spare=len(self.running))
            if drafts := drafts[: sequence.capacity - stop]:
                chunks[index] = Chunk(sequence, start, stop + len(drafts), drafts)

    def _admit_some(
        self,
        budget: int,
        chunks: list[Chunk],
        started: list[RequestStarted],
        except_namespaces: Collection[str] = (),
    ) -> int:
        """Adds waiting sequences to a plan, new ones only of other namespaces; returns the budget that they use.

        Followers are passed over until their leader's prompt is computed.
        """
        left = budget
        for sequence in list(self.waiting):
            is_excepted = not sequence.preemptions and sequence.request.cache_namespace in except_namespaces
            leader = sequence.active_leader
            if is_excepted or (leader and not leader.has_prompt):
                continue
            # The encoder processes the whole source in this step, unless it already has for the leader.
            source_tokens = 0 if leader else len(sequence.request.source)
            if left <= 0 or len(self.running) >= self.limits.max_running or not self._admit(sequence):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.arrival)
            if not sequence.preemptions:
                started.append(RequestStarted(sequence.request.id, sequence.num_computed))
            left -= self._add_chunk(sequence, left, chunks) + source_tokens
        return budget - left

    def _add_prefill_chunks(self, budget: int, prefilling: list[Sequence], chunks: list[Chunk]) -> int:
        """Adds chunks of running prompts, splitting `budget` evenly among namespaces; returns the part that they use.

        A budget can be divided, so each step is shared exactly, and there is no order of turns to remember.
        """
        queues: dict[str, list[Sequence]] = {}
        for sequence in prefilling:
            queues.setdefault(sequence.request.cache_namespace, []).append(sequence)
        spent = 0
        # The smallest demand first: the unused part of its share goes to the others.
        for n_before, queue in enumerate(sorted(queues.values(), key=lambda queue: sum(s.num_pending for s in queue))):
            share = (budget - spent) // (len(queues) - n_before)
            for sequence in queue:
                if share <= 0:
                    break
                cost = self._add_chunk(sequence, share, chunks)
                share -= cost
                spent += cost
        return spent

    def _add_chunk(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Adds a sequence's next chunk to a plan; returns its cost, 0 if the step has no block for it."""
        # A scored token costs twice as much; at least one token is taken.
        length = -(-budget // 2) if sequence.num_unscored else budget
        start = sequence.num_scheduled
        stop = self._allocator.allocate_chunk(sequence, start, start + min(sequence.num_pending, length))
        if stop <= start:
            return 0
        chunks.append(Chunk(sequence, start, stop))
        return chunks[-1].cost

    def _grow(self, sequence: Sequence) -> bool:
        """Allocates a block for the pending token, preempting if need be; False if `sequence` itself was preempted."""
        while not self._allocator.can_extend((sequence,)):
            # Without a victim, a sequence that is never preempted has late masks, and blocks for a whole chunk.
            if (victim := self._youngest()) is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        self._allocator.extend(sequence)
        return True

    def _youngest(self) -> Sequence | None:
        """The youngest running sequence that may be preempted."""
        return next((s for s in reversed(self.running) if not self._is_final(s)), None)

    def _is_final(self, sequence: Sequence) -> bool:
        """Whether the sequence is never preempted again."""
        return sequence.preemptions >= self.limits.max_preemptions

    def _admit(self, sequence: Sequence) -> bool:
        """Allocates the blocks of a waiting sequence; False if too few are free."""
        length, running = len(sequence.tokens), self.running
        if self._is_final(sequence):
            # The last token takes no block, unless the model has to say whether it ends a grammar.
            length = max(length, sequence.max_length - (not sequence.request.grammar))
            final = [other for other in running if self._is_final(other)]
            is_admitted = self._allocator.admit(sequence, length, spare=0, running=running, final=final)
        else:
            # Keep one spare block per running sequence, so that growing one does not preempt the new one.
            is_admitted = self._allocator.admit(sequence, length, spare=len(running), running=running)
        if is_admitted:
            sequence.leader = None  # needed for the first admission only
        return is_admitted

    def _preempt(self, sequence: Sequence) -> None:
        self._remove(sequence)
        sequence.waits_for_mask = False
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.insert(0, sequence)

    def _discard(self, chunk: Chunk) -> None:
        """Drops the rows of a chunk with drafts, and computes the sequence again without any.

        A row of it is not finite. That may be the row of a wrong draft, whose values made rows before it non-finite: a
        masked value counts 0 times, which is not 0 for an infinity. The blocks before it are found in the prefix cache.
        """
        sequence = chunk.sequence
        sequence.may_speculate = False
        self._allocator.drop_rows(sequence, chunk.start, chunk.stop)
        self._preempt(sequence)
        sequence.preemptions = min(sequence.preemptions, self.limits.max_preemptions)

    def _fail(self, sequence: Sequence, message: str) -> RequestFailed:
        """Ends a sequence with an error and drops its blocks from the prefix cache."""
        self._allocator.invalidate(sequence)
        self._end(sequence)
        return RequestFailed(sequence.request.id, message)

    def _end(self, sequence: Sequence) -> None:
        self._remove(sequence)
        self._mark_ended(sequence)

    def _mark_ended(self, sequence: Sequence) -> None:
        sequence.ended = True
        if self.draft_planner:
            self.draft_planner.forget(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._allocator.release(sequence)
