"""Who runs in the next step: plan() and commit(). Pure: token ids and block ids, no tensor, no clock.

    waiting --admit--> running --last token--> gone
       ^                  |
       +---- preempt -----+      blocks released (full ones stay cached), tokens kept, recomputed later

A step is a list of chunks under a token budget: decodes first, so that nobody's inter-token time hangs on somebody's
prompt; then prefills in pieces; then new requests by arrival. Admission takes the blocks of all tokens known so far, so
only decodes grow, and where no block is left the youngest gives way. A sequence that gave way `max_preemptions` times
comes back with all the blocks it can ever need and is never chosen again: everybody finishes.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from app.engine.blocks import BlockPool, chain_hash, root_hash
from app.engine.types import (
    BatchPlan,
    Chunk,
    Counters,
    Drawn,
    Failed,
    FinishReason,
    Request,
    Sequence,
    Started,
    StepReport,
    TokenEvent,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds of one step."""

    tokens_per_step: int
    max_running: int
    max_preemptions: int = 4

    def __post_init__(self) -> None:
        if self.tokens_per_step < self.max_running:
            raise ValueError(
                f"tokens per step ({self.tokens_per_step}) must be at least the running requests ({self.max_running})"
            )


class Scheduler:
    """Owns the sequences and the block pool."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, weights_version: str = "") -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # by arrival
        self.preemptions = 0
        self._arrivals = 0
        self._dirty: set[int] = set()  # held numbers that are not finite; cleared for their next owner
        self._to_clear: list[int] = []
        self._version = weights_version

    @property
    def has_work(self) -> bool:
        """Whether plan() has anything to plan."""
        return bool(self.waiting or self.running)

    @property
    def counters(self) -> Counters:
        """For the report of a step."""
        blocks = self.pool.counts
        return Counters(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_active=blocks.active,
            blocks_cached=blocks.cached,
            blocks_total=self.pool.total,
            preemptions=self.preemptions,
        )

    def add(self, request: Request) -> None:
        """A new request at the end of the queue. The caller has checked that it fits alone."""
        self._arrivals += 1
        tokens = [*request.prompt, *request.generated]
        self.waiting.append(Sequence(request=request, tokens=tokens, arrival=self._arrivals))

    def cancel(self, request_id: str) -> None:
        """Forgets a request and frees its blocks; one that is gone already is no error."""
        for sequence in [s for s in self.running if s.request.id == request_id]:
            self._remove(sequence)
        self.waiting = deque(s for s in self.waiting if s.request.id != request_id)

    def plan(self) -> BatchPlan:
        """The chunks of the next step; commit() must follow."""
        preemptions = self.preemptions
        chunks = self._plan_decodes()
        budget = self.limits.tokens_per_step - len(chunks)
        for sequence in self.running:
            if sequence.num_pending > 1 and budget:
                chunks.append(_next_chunk(sequence, budget))
                budget -= chunks[-1].stop - chunks[-1].start
        started = []
        # Nobody comes in by the door through which somebody was just shown out.
        while self.waiting and budget > 0 and self.preemptions == preemptions:
            if len(self.running) >= self.limits.max_running or not self._admit(self.waiting[0]):
                break
            sequence = self.waiting.popleft()
            insort(self.running, sequence, key=lambda s: s.arrival)
            if not sequence.preemptions:
                started.append(Started(sequence.request.id, sequence.num_computed))
            chunks.append(_next_chunk(sequence, budget))
            # The encoder reads the source in the same step, and in one piece.
            budget -= chunks[-1].stop - chunks[-1].start + len(sequence.request.source)
        clear, self._to_clear = tuple(self._to_clear), []
        return BatchPlan(tuple(chunks), tuple(started), clear)

    def commit(self, plan: BatchPlan, drawn: Mapping[str, Drawn]) -> StepReport:
        """Takes the step's results in: `drawn` holds one entry for each request whose chunk samples."""
        events, failed = [], []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            self._publish(sequence)
            if not chunk.samples:
                continue
            result = drawn[sequence.request.id]
            if result.failure:
                failed.append(Failed(sequence.request.id, result.failure))
                self._remove(sequence)
            elif result.token is None:
                failed.append(Failed(sequence.request.id, "the model's output for this request is not finite"))
                self.pool.forget(sequence.blocks)
                self._dirty |= set(sequence.blocks)
                self._remove(sequence)
            elif sequence.request.max_tokens == 0:
                events.append(TokenEvent(sequence.request.id, 0, None, finish=FinishReason.LENGTH))
                self._remove(sequence)
            else:
                events.append(self._append(sequence, result))
        return StepReport(events=tuple(events), failed=tuple(failed), counters=self.counters)

    def violations(self) -> list[str]:
        """What is wrong with the blocks; tests ask after every step."""
        return self.pool.violations(s.blocks for s in [*self.running, *self.waiting])

    def _plan_decodes(self) -> list[Chunk]:
        chunks = []
        for sequence in list(self.running):
            # An older sequence may have made this one give way.
            if sequence.num_pending == 1 and sequence.blocks and self._grow(sequence):
                chunks.append(_next_chunk(sequence, 1))
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        """Room for the pending token, by preemption where need be; False where `sequence` itself had to give way."""
        missing = self.pool.needed(len(sequence.tokens)) - len(sequence.blocks)
        while missing > self.pool.available:
            victim = next(s for s in reversed(self.running) if s.preemptions < self.limits.max_preemptions)
            self._preempt(victim)
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self._allocate(missing)
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence its blocks, cached ones first; False where there are too few."""
        certain = sequence.preemptions >= self.limits.max_preemptions
        length = sequence.request.max_length if certain else len(sequence.tokens)
        found = self.pool.find(self._hashes(sequence, (len(sequence.tokens) - 1) // self.pool.block_size))
        self.pool.share(found)
        missing = self.pool.needed(length) - len(found)
        # One spare block for each running sequence, so that the newcomer does not push out whoever grows next.
        if missing + len(self.running) * (not certain) > self.pool.available:
            self.pool.release(found)
            return False
        sequence.blocks = found + self._allocate(missing)
        sequence.num_computed = len(found) * self.pool.block_size
        sequence.num_published = len(found)
        return True

    def _allocate(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        self._to_clear += self._dirty.intersection(blocks)
        self._dirty.difference_update(blocks)
        return blocks

    def _preempt(self, sequence: Sequence) -> None:
        self._remove(sequence)
        sequence.num_computed = sequence.num_published = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def _append(self, sequence: Sequence, drawn: Drawn) -> TokenEvent:
        assert drawn.token is not None
        index, request = sequence.num_generated, sequence.request
        sequence.tokens.append(drawn.token)
        finish = None
        if drawn.token in request.stop_ids or drawn.complete:
            finish = FinishReason.STOP
        elif sequence.num_generated >= request.max_tokens:
            finish = FinishReason.LENGTH
        if finish:
            self._remove(sequence)
        return TokenEvent(request.id, index, drawn.token, drawn.logprob, drawn.top, finish)

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.num_computed // self.pool.block_size
        names = self._hashes(sequence, full)
        for index in range(sequence.num_published, full):
            self.pool.publish(sequence.blocks[index], names[index])
        sequence.num_published = max(full, sequence.num_published)

    def _hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Names of the first `count` blocks."""
        size, hashes = self.pool.block_size, sequence.hashes
        while len(hashes) < count:
            parent = hashes[-1] if hashes else root_hash(self._version, sequence.request.salt, sequence.request.source)
            start = len(hashes) * size
            hashes.append(chain_hash(parent, sequence.tokens[start : start + size]))
        return hashes[:count]


def _next_chunk(sequence: Sequence, budget: int) -> Chunk:
    return Chunk(sequence, sequence.num_computed, min(len(sequence.tokens), sequence.num_computed + budget))
