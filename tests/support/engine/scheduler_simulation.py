"""A simulated device for scheduler tests: its cache stores (position, token) per slot, and it samples by hashing them.

It reads through the block table, which reveals blocks that are shared wrongly, released early or not written.
"""

from __future__ import annotations

from app.common.types import (
    MASK_NOT_READY,
    BatchPlan,
    Chunk,
    FinishReason,
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
    """A cache of (position, token), and a model that hashes everything it reads."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        self.prompt_tokens = 0
        """Number of prompt tokens computed."""
        self.poison: set[tuple[int, int]] = set()
        """Slots with non-finite values: no other request may read their blocks until they are cleared."""

    def run(self, plan: BatchPlan, *, bad: str = "", late: frozenset[str] = frozenset()) -> StepResult:
        """Runs a step. `late` requests are computed but not sampled, as if their grammar mask were not ready."""
        self.poison = {slot for slot in self.poison if slot[0] not in plan.clear}
        self.copy(plan.copies)
        for chunk in plan.chunks:
            self.prompt_tokens += max(0, min(chunk.stop, len(chunk.sequence.request.prompt)) - chunk.start)
            self._write(chunk)
        good = [chunk for chunk in plan.chunks if chunk.sequence.request.id != bad]
        spoilt = [chunk for chunk in plan.chunks if chunk not in good and (chunk.samples or chunk.scores)]
        self.poison |= {self._slot(c.sequence, position) for c in spoilt for position in range(c.start, c.stop)}
        for chunk in good:
            own = [(block, offset) for block in chunk.sequence.blocks for offset in range(self.block_size)]
            assert not self.poison.intersection(own), "a poisoned block was not cleared"
        drawn = {c.sequence.request.id: self._draw(c) for c in good if c.samples}
        scores = {c.sequence.request.id: self._score(c) for c in good if c.scores}
        drawn |= {c.sequence.request.id: (SampledToken(None),) * len(c.sampled_rows) for c in spoilt if c.samples}
        drawn |= {name: (MASK_NOT_READY,) * len(drawn[name]) for name in late & drawn.keys()}
        return StepResult(drawn, {**scores, **{c.sequence.request.id: None for c in spoilt if c.scores}})

    def copy(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for source, target in pairs:
            for offset in range(self.block_size):
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]
                assert (source, offset) not in self.poison, "a poisoned slot was copied"

    def _write(self, chunk: Chunk) -> None:
        """Computes the rows of a chunk; tokens after the known ones are what the rows before them sample."""
        sequence, tokens = chunk.sequence, chunk.sequence.tokens[:]
        for position in range(chunk.start, chunk.stop):
            if position == len(tokens):
                tokens.append(_drawn(sequence.request, self._read(sequence, position)))
            self.slots[self._slot(sequence, position)] = (position, tokens[position])

    def _draw(self, chunk: Chunk) -> tuple[SampledToken, ...]:
        read = self._read(chunk.sequence, chunk.stop)
        return tuple(SampledToken(_drawn(chunk.sequence.request, read[: row + 1])) for row in chunk.sampled_rows)

    def _score(self, chunk: Chunk) -> tuple[TokenScore, ...]:
        assert all(chunk.start < position <= chunk.stop for position in chunk.scores), (
            "a score of a row that was not computed"
        )
        request, read = chunk.sequence.request, self._read(chunk.sequence, chunk.stop)
        return tuple((_scored(request, read, position), ()) for position in chunk.scores)

    def _read(self, sequence: Sequence, length: int) -> list[tuple[int, int]]:
        """Contents of the slots of the first `length` positions."""
        read = [self.slots[self._slot(sequence, position)] for position in range(length)]
        assert [position for position, _ in read] == list(range(length)), "a slot holds another position"
        return read

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.blocks[position // self.block_size], position % self.block_size


def _drawn(request: Request, read: list[tuple[int, int]]) -> int:
    """The model: the next token is a hash of all (position, token) before it."""
    return hash((request.params.seed, *read)) % VOCAB


def _scored(request: Request, read: list[tuple[int, int]], position: int) -> float:
    """The score of a prompt token: a hash of the tokens before it and of itself."""
    return float(hash((_drawn(request, read[:position]), request.prompt[position])))


def step(scheduler: Scheduler, device: SimulatedDevice) -> tuple[BatchPlan, StepReport]:
    """Runs one step, and checks the block invariants."""
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
        """Registers a request."""
        self.events[request.id] = []
        self.scores[request.id] = [float(n) for n in range(request.scored)]

    def take(self, report: StepReport) -> None:
        for score in report.scores:
            assert not self.events[score.request_id], "a score after a token"
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


def expected_output(request: Request) -> Delivered:
    """The output of the simulated model by its definition, without scheduler or cache."""
    delivered, read = Delivered([request]), list(enumerate(request.prompt))
    if request.prompt_logprobs is not None:
        positions = range(request.scored + 1, len(read))
        delivered.scores[request.id] += [_scored(request, read, position) for position in positions]
    while not delivered.finished:
        index, token = len(read) - len(request.prompt), None
        if request.max_tokens:
            read.append((len(read), token := _drawn(request, read)))
        is_last = len(read) == len(request.prompt) + request.max_tokens
        finish = FinishReason.STOP if token in request.stop_ids else FinishReason.LENGTH if is_last else None
        delivered.take(StepReport(events=(SampledEvent(request.id, index, token, finish=finish),)))
    return delivered
