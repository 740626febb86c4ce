"""An asynchronous device: computes a launched step only when it is collected, from the state at the launch.

Wraps any runner. Like a GPU, it keeps sampled tokens until the engine collects them. It checks that the engine reads,
launches and releases only what it may.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress

from app.engine.execution.step_runner import StepRunner
from app.engine.sampling.sampled_token import MASK_NOT_READY
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence, StepResult
from app.engine.scheduling.block_pool import BlockPool


class WatchedPool(BlockPool):
    """Counts how often each block was released by its last owner."""

    def __init__(self, total: int, block_size: int, *, window: int | None = None) -> None:
        super().__init__(total, block_size, window=window)
        self.ends = [0] * total

    def release(self, blocks: list[int]) -> None:  # type: ignore[override]
        super().release(blocks)
        for block in blocks:
            self.ends[block] += not self._references[block]


@dataclass(slots=True)
class _Flight:
    plan: BatchPlan
    kept: BatchPlan
    """The plan with copies of its sequences at the launch."""
    samples: list[bool]
    """Which chunks sample a token, according to the plan at the launch."""
    uses: dict[tuple[int, int], int]
    """Cache group and block that the step reads or writes -> how often it had been released at the launch."""


class DelayedRunner:
    """A `StepRunner` and `AsyncStepRunner` that runs at most one step ahead."""

    def __init__(self, runner: StepRunner, *pools: WatchedPool) -> None:
        self.runner = runner
        self.begun: list[BatchPlan] = []
        """All plans launched or run."""
        self.n_launched = 0
        self.draws: Counter[str] = Counter()
        """Request -> number of tokens sampled, steps in flight included."""
        self.refuses: Callable[[BatchPlan], bool] = lambda _plan: False
        self.before_launch: Callable[[BatchPlan], None] = lambda _plan: None
        """Called before a launch; may raise, as may before_run."""
        self.before_run: Callable[[BatchPlan], None] = lambda _plan: None
        self._pools = pools
        self._flights: deque[_Flight] = deque()
        self._drawn: dict[Sequence, int] = {}

    def run(self, plan: BatchPlan) -> StepResult:
        assert not self._flights, "a step runs while another one is in flight"
        assert not any(_reads_drawn(chunk) for chunk in plan.chunks), "reads a token that no step has sampled"
        self.before_run(plan)
        self.begun.append(plan)
        result = self.runner.run(plan)
        self.draws.update(name for name, rows in result.sampled.items() for row in rows if row is not MASK_NOT_READY)
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
            assert not chunk.sequence.ended, "a chunk of a sequence that has ended"
            assert missing <= drawing.count(chunk.sequence), "reads a token that no step in flight samples"
            assert _reads_drawn(chunk) == (missing == 1)
        kept = BatchPlan(tuple(map(_copy, plan.chunks)), clear=plan.clear, copies=plan.copies)
        used = {block for chunk in kept.chunks for block in self._held(chunk.sequence)}
        used |= {(group, block) for group, *pair in plan.copies for block in pair} | {*plan.clear}
        samples = [chunk.samples for chunk in plan.chunks]
        uses = {(group, block): self._pools[group].ends[block] for group, block in used}
        flight = _Flight(plan, kept, samples, uses)
        self._flights.append(flight)
        self.begun.append(plan)
        self.n_launched += 1
        self.draws.update(chunk.sequence.request.id for chunk in plan.chunks if chunk.samples)
        return flight

    def collect(self, flight: _Flight) -> StepResult:
        assert flight is self._flights.popleft(), "steps must be collected in the order of their launches"
        assert all(self._pools[group].ends[block] == ends for (group, block), ends in flight.uses.items()), (
            "a block was released while a step used it"
        )
        for chunk, kept in zip(flight.plan.chunks, flight.kept.chunks, strict=True):
            if _reads_drawn(kept):
                kept.sequence.tokens.append(self._drawn[chunk.sequence])
        for plan in (flight.plan, flight.kept):
            assert flight.samples == [chunk.samples for chunk in plan.chunks], (
                "which chunks sample must be known at the launch"
            )
        result = self.runner.run(flight.kept)
        drawing = [chunk.sequence for chunk in compress(flight.plan.chunks, flight.samples)]
        self._drawn = {sequence: result.sampled[sequence.request.id][-1].token or 0 for sequence in drawing}
        return result

    def _held(self, sequence: Sequence) -> set[tuple[int, int]]:
        tables = zip(self._pools, sequence.blocks, strict=False)
        return {(group, block) for group, (pool, blocks) in enumerate(tables) for block in pool.held(blocks)}


def _reads_drawn(chunk: Chunk) -> bool:
    """Whether the step in flight is still sampling its last token."""
    return chunk.stop - len(chunk.drafts) > len(chunk.sequence.tokens)


def _copy(chunk: Chunk) -> Chunk:
    """The chunk with a copy of its sequence."""
    now = chunk.sequence
    then = Sequence(request=now.request, tokens=now.tokens[:], arrival=now.arrival, num_scored=now.num_scored)
    then.blocks = tuple(blocks[:] for blocks in now.blocks)
    return Chunk(then, chunk.start, chunk.stop, chunk.drafts)
