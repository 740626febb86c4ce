"""A slow device: computes a launched step only when it is collected, from its state at the launch.

It wraps any runner. Like a GPU, it keeps sampled tokens until the engine collects them, and it checks what the engine
may know, launch and release.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress

from app.common.types import MASK_NOT_READY, BatchPlan, Chunk, Sequence, StepResult
from app.engine.execution.engine import StepRunner
from app.engine.scheduling.block_allocator import BlockPool


class WatchedPool(BlockPool):
    """Knows how often each block was given back by its last owner."""

    def __init__(self, total: int, block_size: int) -> None:
        super().__init__(total, block_size)
        self.ends = [0] * total

    def release(self, blocks: list[int]) -> None:  # type: ignore[override]
        super().release(blocks)
        for block in blocks:
            self.ends[block] += not self._references[block]


@dataclass(slots=True)
class _Flight:
    plan: BatchPlan
    kept: BatchPlan
    """The plan with sequences as they were at the launch."""
    samples: list[bool]
    """Which of its chunks are drawn from, by what the plan said at the launch."""
    uses: dict[int, int]
    """The blocks that it reads and writes, and how often each had been given back."""


class Delayed:
    """`StepRunner` and `AsyncStepRunner`, one step ahead at most."""

    def __init__(self, runner: StepRunner, pool: WatchedPool) -> None:
        self.runner = runner
        self.begun: list[BatchPlan] = []
        """All plans that were launched or run."""
        self.n_launched = 0
        self.draws: Counter[str] = Counter()
        """Rows that were drawn from, or will be, by request."""
        self.refuses: Callable[[BatchPlan], bool] = lambda _plan: False
        self.before_launch: Callable[[BatchPlan], None] = lambda _plan: None
        """May raise; so may the next."""
        self.before_run: Callable[[BatchPlan], None] = lambda _plan: None
        self._pool = pool
        self._flights: deque[_Flight] = deque()
        self._drawn: dict[Sequence, int] = {}

    def run(self, plan: BatchPlan) -> StepResult:
        assert not self._flights, "a step is run while another one is in flight"
        assert not any(_reads_drawn(chunk) for chunk in plan.chunks), "reads a token that no step has sampled"
        self.before_run(plan)
        self.begun.append(plan)
        result = self.runner.run(plan)
        self.draws.update(name for name, token in result.sampled.items() if token is not MASK_NOT_READY)
        return result

    def launchable(self, plan: BatchPlan) -> bool:
        return not any(c.scores or c.sequence.request.grammar for c in plan.chunks) and not self.refuses(plan)

    def launch(self, plan: BatchPlan) -> _Flight:
        assert len(self._flights) < 2, "more than one step ahead"
        assert plan.chunks
        self.before_launch(plan)
        drawing = [c.sequence for flight in self._flights for c in flight.plan.chunks if c.samples]
        for chunk in plan.chunks:
            missing = chunk.stop - len(chunk.sequence.tokens)
            assert not chunk.sequence.ended, "a row of a sequence that has ended"
            assert missing <= drawing.count(chunk.sequence), "reads a token that no step in flight samples"
            assert _reads_drawn(chunk) == (missing == 1)
        kept = BatchPlan(tuple(map(_as_it_is, plan.chunks)), clear=plan.clear, copies=plan.copies)
        used = {block for chunk in kept.chunks for block in chunk.sequence.blocks}
        used |= {block for pair in plan.copies for block in pair} | {*plan.clear}
        samples = [chunk.samples for chunk in plan.chunks]
        flight = _Flight(plan, kept, samples, {block: self._pool.ends[block] for block in used})
        self._flights.append(flight)
        self.begun.append(plan)
        self.n_launched += 1
        self.draws.update(chunk.sequence.request.id for chunk in plan.chunks if chunk.samples)
        return flight

    def collect(self, flight: _Flight) -> StepResult:
        assert flight is self._flights.popleft(), "steps come back in the order of their launches"
        assert all(self._pool.ends[block] == ends for block, ends in flight.uses.items()), "released while it is used"
        for chunk, kept in zip(flight.plan.chunks, flight.kept.chunks, strict=True):
            if _reads_drawn(kept):
                kept.sequence.tokens.append(self._drawn[chunk.sequence])
        for plan in (flight.plan, flight.kept):
            assert flight.samples == [chunk.samples for chunk in plan.chunks], "known at the launch, and right"
        result = self.runner.run(flight.kept)
        drawing = [chunk.sequence for chunk in compress(flight.plan.chunks, flight.samples)]
        self._drawn = {sequence: result.sampled[sequence.request.id].token or 0 for sequence in drawing}
        return result


def _reads_drawn(chunk: Chunk) -> bool:
    """Whether its last token is being drawn by the step before."""
    return chunk.stop > len(chunk.sequence.tokens)


def _as_it_is(chunk: Chunk) -> Chunk:
    """With a sequence that does not change any more."""
    now = chunk.sequence
    then = Sequence(request=now.request, tokens=now.tokens[:], arrival=now.arrival, blocks=now.blocks[:])
    return Chunk(then, chunk.start, chunk.stop)
