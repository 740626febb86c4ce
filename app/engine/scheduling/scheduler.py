"""Scheduler: plans which sequences run in the next step, and commits the results of steps.

    waiting --admit--> running --last token--> gone
       ^                  |
       +---- preempt -----+      blocks released (full ones stay cached), tokens kept, recomputed later

A step is a list of chunks under a token budget: decodes first, so that a long prompt does not delay the next token of
running sequences; then chunked prefills, in small chunks while decodes wait for them; then new requests by arrival.
Admission allocates the blocks of all tokens known so far, so only decodes grow, and when no block is left the youngest
sequence is preempted. A sequence that was preempted `max_preemptions` times is readmitted with all the blocks it can
ever need and is never preempted again, so every sequence finishes.

plan_ahead() plans the step after one that is still running. It counts tokens that are not sampled yet, preempts no
sequence, and leaves out sequences that certainly end in the running step. A sequence that ends unexpectedly has
computed one extra token, which is discarded.

StepLimits bounds a step. WaitingQueue orders the sequences to be admitted, fairly among cache namespaces.
BlockLeakCheck verifies the accounting of cache blocks in production: every so many steps, because checking every block
after every step would cost more than a small model's step, and once when the engine becomes idle.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as PySequence
from dataclasses import dataclass
from itertools import chain

from app.common.types import (
    BatchPlan,
    Chunk,
    Counters,
    PromptScores,
    Request,
    RequestFailed,
    RequestStarted,
    Sequence,
    StepReport,
)
from app.engine.sampling.sampler_io import LATE, StepResult, take_in
from app.engine.scheduling.block_allocator import BlockAllocator, BlockPool, StepsInFlight


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """Bounds of one step."""

    tokens_per_step: int
    max_running: int
    max_preemptions: int = 4
    prompt_tokens_beside: int | None = None
    """Prompt tokens in a step with decodes; None: as many as fit."""
    prompt_tokens_shared: int | None = None
    """Prompt tokens in any step while API keys are in use: another key's first token may wait for that step."""
    prompt_tokens_per_decode: int = 4
    """Always allowed for each decode: a step of many decodes is long anyway."""

    def __post_init__(self) -> None:
        if self.tokens_per_step < self.max_running:
            raise ValueError(
                f"tokens per step ({self.tokens_per_step}) must be at least the running requests ({self.max_running})"
            )

    def prompt_budget(self, n_decodes: int, *, is_shared: bool = False) -> int:
        """Prompt tokens that fit into a step with so many decodes."""
        budget = self.tokens_per_step - n_decodes
        if is_shared and self.prompt_tokens_shared is not None:
            budget = min(budget, self.prompt_tokens_shared)
        if not n_decodes or self.prompt_tokens_beside is None:
            return budget
        return min(budget, max(self.prompt_tokens_beside, self.prompt_tokens_per_decode * n_decodes))


class WaitingQueue:
    """Round robin among tenants (requests of one cache namespace); first come, first served within a tenant.

    Followers are skipped until their leader's prompt is computed. A leader arrives before its followers and is either
    ahead of them or running, so there is no circular wait. Preempted sequences go to the head of the queue.

        turn:  ann [a1 a2 a3]   bob [b1]   cyd [c1 c2]        order: a1 b1 c1 a2 c2 a3
    """

    def __init__(self) -> None:
        self._returned: deque[Sequence] = deque()
        self._lanes: dict[str, deque[Sequence]] = {}
        """By cache namespace, in the order of their turns; a namespace without waiting sequences has no entry."""

    def __len__(self) -> int:
        return len(self._returned) + sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned
        for lane in self._lanes.values():
            yield from lane

    @property
    def has_namespaces(self) -> bool:
        """Whether requests of API keys wait, which must not delay those of other keys."""
        return any(self._lanes)

    def append(self, sequence: Sequence) -> None:
        """Appends a sequence to its tenant's lane; a tenant without a lane takes its turn after all others."""
        self._lanes.setdefault(sequence.request.cache_namespace, deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Returns a preempted sequence to the head of the queue."""
        self._returned.appendleft(sequence)

    def candidates(self, may_come: Callable[[str], bool] = lambda _salt: True) -> Iterator[Sequence]:
        """Sequences to admit, in order. Lazy: the caller admits while iterating and removes the admitted ones after.

        may_come: whether a namespace may admit one more; evaluated before each of its turns until it is False.
        """
        yield from self._returned
        lanes = {salt: (s for s in lane if not _waits_for_leader(s)) for salt, lane in self._lanes.items()}
        while lanes:
            for salt, lane in list(lanes.items()):
                sequence = next(lane, None) if may_come(salt) else None
                if sequence is None:
                    del lanes[salt]
                else:
                    yield sequence

    def admit(self, sequences: Iterable[Sequence]) -> None:
        """Removes admitted sequences and moves their tenants behind all others, in this order."""
        for sequence in sequences:
            is_turn = sequence not in self._returned
            self.remove([sequence])
            lane = self._lanes.pop(sequence.request.cache_namespace, None) if is_turn else None
            if lane:
                self._lanes[sequence.request.cache_namespace] = lane

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Removes sequences from the queue."""
        for sequence in sequences:
            if sequence in self._returned:
                self._returned.remove(sequence)
                continue
            lane = self._lanes[sequence.request.cache_namespace]
            lane.remove(sequence)
            if not lane:
                del self._lanes[sequence.request.cache_namespace]


def has_place(salt: str, running: PySequence[Sequence], places: int) -> bool:
    """With API keys, reserves the last eighth of the slots for tenants that have nothing running."""
    is_last = places - len(running) <= places // 8
    return not (is_last and salt and any(sequence.request.cache_namespace == salt for sequence in running))


def leader_of(request: Request, older: Iterable[Sequence]) -> Sequence | None:
    """The leader, if its prompt, source and namespace are equal: else its keys and values would be wrong."""
    if request.leader is None:
        return None
    leader = next((sequence for sequence in older if sequence.request.id == request.leader), None)
    same = leader and all(
        getattr(leader.request, x) == getattr(request, x) for x in ("prompt", "source", "cache_namespace")
    )
    return leader if same else None


def _waits_for_leader(sequence: Sequence) -> bool:
    leader = sequence.active_leader
    return leader is not None and not leader.has_prompt


NOT_FINITE = "the model's output for this request is not finite"


class Scheduler:
    """Owns the sequences and the block pool."""

    def __init__(self, limits: StepLimits, pool: BlockPool, weights_version: str = "") -> None:
        self.limits = limits
        self.pool = pool
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # by arrival
        self.preemptions = self.block_violations = 0
        self._arrivals = 0
        self._flights = StepsInFlight(pool)
        self._allocator = BlockAllocator(pool, self._flights, weights_version)

    @property
    def has_work(self) -> bool:
        """Whether there is anything to plan or to commit."""
        return bool(self.waiting or self.running or self._flights)

    @property
    def counters(self) -> Counters:
        """For the report of a step."""
        blocks = self.pool.counts
        return Counters(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_active=blocks.active,
            blocks_total=self.pool.total,
            preemptions=self.preemptions,
            block_violations=self.block_violations,
        )

    def add(self, request: Request) -> None:
        """A new request at the end of the queue. The caller has checked that it fits alone."""
        self._arrivals += 1
        tokens = [*request.prompt, *request.generated]
        sequence = Sequence(request=request, tokens=tokens, arrival=self._arrivals, num_scored=request.scored)
        # Log-probabilities need rows of one's own.
        sequence.leader = None if sequence.num_unscored else leader_of(request, chain(self.waiting, self.running))
        self.waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Forgets a request and frees its blocks, once no step uses them; one that is gone already is no error."""
        for sequence in [s for s in self.running if s.request.id == request_id]:
            self._end(sequence)
        waiting = [s for s in self.waiting if s.request.id == request_id]
        self.waiting.remove(waiting)
        for sequence in waiting:
            sequence.ended = True

    def plan(self) -> BatchPlan:
        """The chunks of the next step; none where all sequences wait for masks.

        commit() must follow, without begin() or behind it.
        """
        assert not self._flights, "a sequence in flight must not be preempted"
        preemptions = self.preemptions
        chunks = self._plan_decodes()
        # Admit nothing in a step that preempted.
        return self._fill(chunks, may_admit=self.preemptions == preemptions)

    def plan_ahead(self) -> BatchPlan | None:
        """Plans the step after those in flight; None if there is nothing to compute or too few blocks are free."""
        decodes = [s for s in self.running if _is_decode(s) and not self._stays_behind(s)]
        if sum(max(0, self._allocator.missing(s)) for s in decodes) > self.pool.available:
            return None
        for sequence in decodes:
            self._allocator.extend(sequence)
        plan = self._fill([_decode(sequence) for sequence in decodes])
        return plan if plan.chunks else None

    def begin(self, plan: BatchPlan) -> None:
        """Marks the step as launched, so that plan_ahead() counts its results; steps begin in the order of planning."""
        self._flights.begin(plan)

    def commit(self, plan: BatchPlan, result: StepResult) -> StepReport:
        """Applies the step's results, except for sequences that have ended in the meantime."""
        self._flights.land(plan)
        events, scores, failed = [], [], []
        for chunk in plan.chunks:
            sequence, name, places = chunk.sequence, chunk.sequence.request.id, chunk.scores
            if sequence.ended:
                continue
            if result.failed and name in result.failed:
                failed.append(self._spoilt(sequence, result.failed[name]))
                continue
            drawn = result.drawn[name] if chunk.samples else None
            if drawn is LATE:  # the row is computed again, which gives the same
                continue
            if not (drawn and (drawn.finish or drawn.failure)):  # its logits were never checked for being finite
                sequence.num_computed = chunk.stop
                self._allocator.publish(sequence)
            scored = result.scores[name] if places else ()
            if drawn and drawn.failure and scored is not None:
                failed.append(RequestFailed(name, drawn.failure, is_user_error=True))
                self._end(sequence)
                continue
            if scored is None or (drawn and drawn.token is None and not drawn.finish):
                failed.append(self._spoilt(sequence, NOT_FINITE))
                continue
            if scored:
                scores.append(PromptScores(name, places.start, scored))
                sequence.num_scored += len(scored)
            if drawn:
                events.append(take_in(sequence, drawn))
                if events[-1].finish:
                    self._end(sequence)
        return StepReport(events=tuple(events), scores=tuple(scores), failed=tuple(failed), counters=self.counters)

    def violations(self) -> list[str]:
        """Violated invariants of the block accounting; tests check them after every step."""
        owned = (sequence.blocks for sequence in [*self.running, *self.waiting])
        return self.pool.violations(chain(owned, self._flights.held))

    def _plan_decodes(self) -> list[Chunk]:
        chunks = []
        for sequence in list(self.running):
            # An older sequence may have preempted this one.
            if _is_decode(sequence) and sequence.blocks and self._grow(sequence):
                chunks.append(_decode(sequence))
        return chunks

    def _stays_behind(self, sequence: Sequence) -> bool:
        """Whether the step that is planned ahead leaves this sequence out."""
        if sequence.ends_in_flight:
            return True
        # It skips one step, so that its followers share the prompt while no step writes to its blocks.
        ends_prompt = not sequence.has_prompt and sequence.num_unsampled
        return bool(ends_prompt) and any(follower.leader is sequence for follower in self.waiting)

    def _fill(self, chunks: list[Chunk], *, may_admit: bool = True) -> BatchPlan:
        """A plan of these decodes, and of as much of prompts as fits: running ones, then those that are admitted.

        A namespace that has nothing in the step yet is admitted first, into half of the budget: another one's long
        prompts must not keep a short one waiting.
        """
        prefilling = [s for s in self.running if s.num_pending > 1 and not s.waits_for_mask]
        is_shared = self.waiting.has_namespaces or any(s.request.cache_namespace for s in prefilling)
        budget = self.limits.prompt_budget(len(chunks), is_shared=is_shared)
        started: list[RequestStarted] = []
        if may_admit and prefilling:
            present = {sequence.request.cache_namespace for sequence in self.running}
            budget -= self._admit_some(budget // 2, chunks, started, lambda salt: salt not in present)
        budget -= _share(budget, prefilling, chunks)
        if may_admit:
            self._admit_some(budget, chunks, started)
        clear, copies = self._allocator.take_preparations()
        return BatchPlan(tuple(chunks), tuple(started), clear, copies)

    def _admit_some(
        self,
        budget: int,
        chunks: list[Chunk],
        started: list[RequestStarted],
        may_come: Callable[[str], bool] = lambda _salt: True,
    ) -> int:
        """Adds waiting sequences to a plan, of the namespaces that may come; what it took of the budget."""
        limits, left, first = self.limits, budget, len(chunks)

        def has_slot(salt: str) -> bool:
            return may_come(salt) and has_place(salt, self.running, limits.max_running)

        for sequence in self.waiting.candidates(has_slot):
            # The encoder reads the source in the same step, and in one piece; a leader's is read already.
            to_read = 0 if sequence.active_leader else len(sequence.request.source)
            if left <= 0 or len(self.running) >= limits.max_running or not self._admit(sequence):
                break
            insort(self.running, sequence, key=lambda s: s.arrival)
            if not sequence.preemptions:
                started.append(RequestStarted(sequence.request.id, sequence.num_computed))
            chunks.append(_next_chunk(sequence, left))
            left -= chunks[-1].cost + to_read
        self.waiting.admit(chunk.sequence for chunk in chunks[first:])
        return budget - left

    def _grow(self, sequence: Sequence) -> bool:
        """Allocates a block for the pending token, preempting if need be; False if `sequence` itself was preempted."""
        while self._allocator.missing(sequence) > self.pool.available:
            victim = next(s for s in reversed(self.running) if s.preemptions < self.limits.max_preemptions)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._allocator.extend(sequence)
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Allocates the blocks of a waiting sequence; False if too few are free."""
        certain = sequence.preemptions >= self.limits.max_preemptions
        length = sequence.request.max_length if certain else len(sequence.tokens)
        # Keep one spare block per running sequence, so that growing one does not preempt the newly admitted sequence.
        admitted = self._allocator.admit(sequence, length, spare=0 if certain else len(self.running))
        if admitted:
            sequence.leader = None  # after a preemption it is a sequence like any other
        return admitted

    def _preempt(self, sequence: Sequence) -> None:
        self._remove(sequence)
        sequence.waits_for_mask = False
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.put_back(sequence)

    def _spoilt(self, sequence: Sequence, message: str) -> RequestFailed:
        """Ends a sequence with an error and drops its blocks from the prefix cache."""
        self._allocator.spoil(sequence)
        self._end(sequence)
        return RequestFailed(sequence.request.id, message)

    def _end(self, sequence: Sequence) -> None:
        self._remove(sequence)
        sequence.ended = True

    def _remove(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._allocator.release(sequence)


def _share(budget: int, prefilling: list[Sequence], chunks: list[Chunk]) -> int:
    """Adds chunks of running prompts to a plan, as much of each namespace's as of any other's; what it took."""
    lanes: dict[str, list[Sequence]] = {}
    for sequence in prefilling:
        lanes.setdefault(sequence.request.cache_namespace, []).append(sequence)
    spent = 0
    # The smallest demand first: what it leaves of its share goes to the others.
    for n_before, lane in enumerate(sorted(lanes.values(), key=lambda lane: sum(s.num_pending for s in lane))):
        share = (budget - spent) // (len(lanes) - n_before)
        for sequence in lane:
            if share <= 0:
                break
            chunks.append(_next_chunk(sequence, share))
            share -= chunks[-1].cost
            spent += chunks[-1].cost
    return spent


def _next_chunk(sequence: Sequence, budget: int) -> Chunk:
    # Half as many tokens where each is scored, but one at least.
    room = -(-budget // 2) if sequence.num_unscored else budget
    start = sequence.num_scheduled
    return Chunk(sequence, start, start + min(sequence.num_pending, room))


def _is_decode(sequence: Sequence) -> bool:
    """Whether a token can be drawn from the sequence's one pending row."""
    return sequence.num_pending == 1 and not sequence.waits_for_mask


def _decode(sequence: Sequence) -> Chunk:
    return Chunk(sequence, sequence.num_scheduled, sequence.num_scheduled + 1)


_log = logging.getLogger("inkstream")
_STEPS, _BLOCKS_PER_STEP = 1000, 10
"""Between two looks: 1,000 steps at least, and one for each ten blocks, which are looked at in a microsecond."""


class BlockLeakCheck:
    """Counts into the scheduler's `block_violations`; changes nothing else."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._steps = 0
        self._interval = max(_STEPS, scheduler.pool.total // _BLOCKS_PER_STEP)

    def after_step(self) -> None:
        """Another step is done."""
        self._steps += 1
        if self._steps >= self._interval:
            self._look()

    def when_idle(self) -> None:
        """There is time, if there was work since the last look."""
        if self._steps:
            self._look()

    def _look(self) -> None:
        self._steps = 0
        if wrong := self._scheduler.violations():
            self._scheduler.block_violations += 1
            _log.error(
                "the cache's blocks are not as they should be (%d findings): %s", len(wrong), "; ".join(wrong[:3])
            )
