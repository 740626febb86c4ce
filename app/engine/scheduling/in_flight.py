"""Steps that were begun and are not committed yet, and the blocks that stay where they are until then. Pure.

A device writes to the blocks of a step, and copies from others, at any time between its launch and its commit. What is
given back in the meantime (its owner ended, or was cancelled) is given back when the youngest of these steps is
committed: nobody else gets a block that a step may still use.

    begin(n)   begin(n+1)   commit(n): a sequence ends   commit(n+1)
       |            |              | its blocks are held    | its blocks are free
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from app.common.types import BatchPlan
from app.engine.scheduling.block_pool import BlockPool


class StepsInFlight:
    """In the order of their launches, which is the order of their commits."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._begun: deque[tuple[BatchPlan, list[list[int]]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._begun)

    @property
    def held(self) -> Iterator[list[int]]:
        """Blocks that nobody owns any more and that are not given back."""
        return (blocks for _, held in self._begun for blocks in held)

    def begin(self, plan: BatchPlan) -> None:
        """Its work is under way, or at least nothing is planned any more that does not come after it."""
        for chunk in plan.chunks:
            chunk.sequence.ahead += chunk.stop - chunk.start
        self._begun.append((plan, []))

    def land(self, plan: BatchPlan) -> None:
        """It is done: the oldest of those begun. No error where none was."""
        if not self._begun:
            return
        oldest, held = self._begun.popleft()
        assert oldest is plan, "steps are committed in the order in which they were begun"
        for chunk in plan.chunks:
            chunk.sequence.ahead -= chunk.stop - chunk.start
        for blocks in held:
            self._pool.release(blocks)

    def release(self, blocks: list[int]) -> None:
        """Gives blocks back, at once or as soon as no step can use them."""
        if self._begun:
            self._begun[-1][1].append(blocks)
        else:
            self._pool.release(blocks)


def living(plan: BatchPlan) -> BatchPlan:
    """What there is to compute of it, now that some may have ended; blocks are made ready for those, too, and held."""
    chunks = tuple(chunk for chunk in plan.chunks if not chunk.sequence.ended)
    return BatchPlan(chunks, plan.started, plan.clear, plan.copies)
