"""A device for the tests of the pure core: its cache keeps (position, token) per slot, and it draws from what it reads.

It reads through the block table, so that a block that is shared wrongly, released early or not written shows.
"""

from __future__ import annotations

import hashlib

from app.common.types import (
    MASK_NOT_READY,
    BatchPlan,
    Chunk,
    Request,
    SampledEvent,
    SampledToken,
    Sequence,
    StepReport,
    StepResult,
    TokenScore,
)
from app.engine.scheduling.block_allocator import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits

VOCAB, EOS = 50, 0


class SimulatedDevice:
    """A cache of (position, token) and a model that is a hash of all it reads."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.prompt_tokens = 0
        """Tokens of prompts that were computed."""
        self.poison: set[tuple[int, int]] = set()
        """Slots whose numbers are not finite: no other request may read their blocks before they are cleared."""

    def run(self, plan: BatchPlan, *, bad: str = "", late: frozenset[str] = frozenset()) -> StepResult:
        """Rows of `late` requests are computed and not drawn from, as where a mask is not there yet."""
        self.poison = {slot for slot in self.poison if slot[0] not in plan.clear}
        self.copy(plan.copies)
        for chunk in plan.chunks:
            self.prompt_tokens += max(0, min(chunk.stop, len(chunk.sequence.request.prompt)) - chunk.start)
            for position in range(chunk.start, chunk.stop):
                self.slots[self._slot(chunk.sequence, position)] = (position, chunk.sequence.tokens[position])
        good = [chunk for chunk in plan.chunks if chunk.sequence.request.id != bad]
        spoilt = [chunk for chunk in plan.chunks if chunk not in good and (chunk.samples or chunk.scores)]
        self.poison |= {self._slot(c.sequence, position) for c in spoilt for position in range(c.start, c.stop)}
        for chunk in good:
            own = [(block, offset) for block in chunk.sequence.blocks for offset in range(self.block_size)]
            assert not self.poison.intersection(own), "a block that was not cleared"
        drawn = {c.sequence.request.id: self._draw(c.sequence, c.stop) for c in good if c.samples}
        scores = {c.sequence.request.id: self._score(c) for c in good if c.scores}
        drawn |= {c.sequence.request.id: SampledToken(None) for c in spoilt if c.samples}
        drawn |= dict.fromkeys(late & drawn.keys(), MASK_NOT_READY)
        return StepResult(drawn, {**scores, **{c.sequence.request.id: None for c in spoilt if c.scores}})

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for source, target in pairs:
            for offset in range(self.block_size):
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]
                assert (source, offset) not in self.poison, "a copy of what is not finite"

    def _score(self, chunk: Chunk) -> tuple[TokenScore, ...]:
        """One number for each token: the hash of what stands before it, and of itself."""
        assert all(chunk.start < position <= chunk.stop for position in chunk.scores), "a row that was not computed"
        seen = [
            (self._draw(chunk.sequence, position).token, chunk.sequence.tokens[position]) for position in chunk.scores
        ]
        return tuple((float(hash(pair)), ()) for pair in seen)

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.blocks[position // self.block_size], position % self.block_size

    def _draw(self, sequence: Sequence, length: int) -> SampledToken:
        read = [self.slots[self._slot(sequence, position)] for position in range(length)]
        assert [position for position, _ in read] == list(range(length)), "a slot holds another position"
        seen = hashlib.sha256(repr((sequence.request.params.seed, read)).encode()).digest()
        return SampledToken(int.from_bytes(seen[:4], "big") % VOCAB)


def step(scheduler: Scheduler, device: SimulatedDevice) -> tuple[BatchPlan, StepReport]:
    """One step, with the blocks checked after it."""
    plan = scheduler.plan()
    assert plan.chunks, "a step without progress"
    assert sum(c.stop - c.start for c in plan.chunks) <= scheduler.limits.tokens_per_step
    report = scheduler.commit(plan, device.run(plan))
    assert not scheduler.violations()
    return plan, report


class Delivered:
    """Output that clients received: events in order, each prompt token's score once and before all events."""

    def __init__(self, requests: list[Request]) -> None:
        self.events: dict[str, list[SampledEvent]] = {}
        self.scores: dict[str, list[float]] = {}
        self.finished: set[str] = set()
        for request in requests:
            self.expect(request)

    def expect(self, request: Request) -> None:
        """A further request."""
        self.events[request.id] = []
        self.scores[request.id] = [float(n) for n in range(request.scored)]

    def take(self, report: StepReport) -> None:
        for score in report.scores:
            assert not self.events[score.request_id], "a score behind a token"
            assert score.start == len(self.scores[score.request_id]) + 1
            assert score.tokens
            self.scores[score.request_id] += [own for own, _ in score.tokens]
        for event in report.events:
            assert event.request_id not in self.finished, "an event after the end"
            self.events[event.request_id].append(event)
            if event.finish:
                self.finished.add(event.request_id)

    def tokens(self, request_id: str) -> list[int | None]:
        return [event.token for event in self.events[request_id]]


def make_scheduler(blocks: int, block_size: int, budget: int, running: int, *, beside: int | None = None) -> Scheduler:
    limits = StepLimits(tokens_per_step=budget, max_running=running, prompt_tokens_with_decodes=beside)
    return Scheduler(limits, BlockPool(blocks, block_size))


def alone(request: Request) -> Delivered:
    """What the simulated model generates with unlimited capacity."""
    scheduler, device = make_scheduler(64, 4, 512, 1), SimulatedDevice(4)
    scheduler.add(request)
    delivered = Delivered([request])
    while scheduler.has_work:
        delivered.take(step(scheduler, device)[1])
    return delivered
