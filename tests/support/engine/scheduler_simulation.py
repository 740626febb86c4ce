"""A simulated device for scheduler tests: its cache stores (position, token) per slot, and it samples by hashing them.

It reads through the block tables, which reveals blocks that are shared wrongly, released early or not written. A token
sees in each cache group what the group's window lets it see.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from app.common.types import FinishReason, Request, SampledEvent, StepReport, TokenScore
from app.engine.sampling.sampled_token import MASK_NOT_READY, SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence, StepResult
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.scheduler import Scheduler, StepLimits

VOCAB, EOS = 50, 0


Slot = tuple[int, int, int]
"""Cache group, block and offset."""
Windows = tuple[int | None, ...]
"""The window of each cache group."""


class SimulatedDevice:
    """A cache of (position, token), and a model that hashes everything it reads."""

    def __init__(self, block_size: int, windows: Windows = (None,)) -> None:
        self.block_size = block_size
        self.windows = windows
        self.slots: dict[Slot, tuple[int, int]] = {}
        self.prompt_tokens = 0
        """Number of prompt tokens computed."""
        self.poison: set[Slot] = set()
        """Slots with non-finite values: no other request may read their blocks until they are cleared."""

    def run(self, plan: BatchPlan, *, bad: str = "", late: frozenset[str] = frozenset()) -> StepResult:
        """Runs a step. `late` requests are computed but not sampled, as if their grammar mask were not ready."""
        self.poison = {slot for slot in self.poison if slot[:2] not in plan.clear}
        self.copy(plan.copies)
        for chunk in plan.chunks:
            self.prompt_tokens += max(0, min(chunk.stop, len(chunk.sequence.request.prompt)) - chunk.start)
            self._write(chunk)
        good = [chunk for chunk in plan.chunks if chunk.sequence.request.id != bad]
        spoilt = [chunk for chunk in plan.chunks if chunk not in good and (chunk.samples or chunk.scores)]
        for chunk in spoilt:
            self.poison.update(
                slot for position in range(chunk.start, chunk.stop) for slot in self._slots(chunk.sequence, position)
            )
        for chunk in good:
            tables = enumerate(chunk.sequence.blocks)
            own = [(group, block, i) for group, blocks in tables for block in blocks for i in range(self.block_size)]
            assert not self.poison.intersection(own), "a poisoned block was not cleared"
        read = {c.sequence.request.id: self._read(c.sequence, c.start, c.stop) for c in good}
        drawn = {c.sequence.request.id: self._draw(c, read) for c in good if c.samples}
        scores = {c.sequence.request.id: self._score(c, read) for c in good if c.scores}
        drawn |= {c.sequence.request.id: (SampledToken(None),) * len(c.sampled_rows) for c in spoilt if c.samples}
        drawn |= {name: (MASK_NOT_READY,) * len(drawn[name]) for name in late & drawn.keys()}
        return StepResult(drawn, {**scores, **{c.sequence.request.id: None for c in spoilt if c.scores}})

    def copy(self, copies: tuple[tuple[int, int, int], ...]) -> None:
        for group, source, target in copies:
            for offset in range(self.block_size):
                if (group, source, offset) in self.slots:
                    self.slots[group, target, offset] = self.slots[group, source, offset]
                assert (group, source, offset) not in self.poison, "a poisoned slot was copied"

    def _write(self, chunk: Chunk) -> None:
        for position, token in enumerate(chunk.tokens, chunk.start):
            for slot in self._slots(chunk.sequence, position):
                self.slots[slot] = (position, token)

    def _draw(self, chunk: Chunk, read: dict[str, list[Known]]) -> tuple[SampledToken, ...]:
        request = chunk.sequence.request
        rows = (drawn_token(request, read[request.id], row + 1, self.windows) for row in chunk.sampled_rows)
        return tuple(map(SampledToken, rows))

    def _score(self, chunk: Chunk, read: dict[str, list[Known]]) -> tuple[TokenScore, ...]:
        assert all(chunk.start < position <= chunk.stop for position in chunk.scores), (
            "a score of a row that was not computed"
        )
        request = chunk.sequence.request
        return tuple((_scored(request, read[request.id], position, self.windows), ()) for position in chunk.scores)

    def _read(self, sequence: Sequence, start: int, stop: int) -> list[Known]:
        """For each group the contents of the slots of all positions that the tokens from `start` to `stop` see."""
        groups = []
        for group, window in enumerate(self.windows):
            visible = range(0 if window is None else max(0, start - window + 1), stop)
            read = {position: self.slots[self._slots(sequence, position)[group]] for position in visible}
            assert all(read[position][0] == position for position in visible), "a slot holds another position"
            groups.append(read)
        return groups

    def _slots(self, sequence: Sequence, position: int) -> list[Slot]:
        """The slot of a position in each group."""
        index, offset = position // self.block_size, position % self.block_size
        return [(group, blocks[index], offset) for group, blocks in enumerate(sequence.blocks)]


Known = dict[int, tuple[int, int]]
"""Position -> what is in its slot: position and token."""


def drawn_token(request: Request, groups: list[Known], position: int, windows: Windows) -> int:
    """The model: the token at a position is a hash of all (position, token) that the row before it sees."""
    visible = [0 if window is None else max(0, position - window) for window in windows]
    seen = [read[i] for read, first in zip(groups, visible, strict=True) for i in range(first, position)]
    return hash((request.params.seed, *seen)) % VOCAB


def _scored(request: Request, groups: list[Known], position: int, windows: Windows) -> float:
    """The score of a prompt token: a hash of the tokens that the row before it sees, and of itself."""
    return float(hash((drawn_token(request, groups, position, windows), request.prompt[position])))


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


def make_scheduler(
    blocks: int | Items[int],
    block_size: int,
    budget: int,
    running: int,
    *,
    beside: int | None = None,
    windows: Windows = (None,),
) -> Scheduler:
    """blocks: of each cache group, or of all."""
    limits = StepLimits(tokens_per_step=budget, max_running=running, prompt_tokens_with_decodes=beside)
    counts = [blocks] * len(windows) if isinstance(blocks, int) else blocks
    sizes = zip(counts, windows, strict=True)
    return Scheduler(limits, *(BlockPool(count, block_size, window=window) for count, window in sizes))


def expected_output(request: Request, windows: Windows = (None,)) -> Delivered:
    """The output of the simulated model by its definition, without scheduler or cache."""
    delivered, known = Delivered([request]), {i: (i, token) for i, token in enumerate(request.prompt)}
    read = [known] * len(windows)
    if request.prompt_logprobs is not None:
        positions = range(request.scored + 1, len(known))
        delivered.scores[request.id] += [_scored(request, read, position, windows) for position in positions]
    while not delivered.finished:
        index, token = len(known) - len(request.prompt), None
        if request.max_tokens:
            token = drawn_token(request, read, len(known), windows)
            known[len(known)] = (len(known), token)
        is_last = len(known) == len(request.prompt) + request.max_tokens
        finish = FinishReason.STOP if token in request.stop_ids else FinishReason.LENGTH if is_last else None
        delivered.take(StepReport(events=(SampledEvent(request.id, index, token, finish=finish),)))
    return delivered
