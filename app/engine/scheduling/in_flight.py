"""Tracks steps that were launched but not committed, and defers the release of blocks that they may still use.

Between a step's launch and its commit, the device may write to the step's blocks and copy from others at any time. When
a sequence ends or is cancelled in that window, its blocks are released only after the most recent step in flight
commits, so a block that a step may still use is never reallocated.

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
        """Blocks without an owner that are not released yet."""
        return (blocks for _, held in self._begun for blocks in held)

    def begin(self, plan: BatchPlan) -> None:
        """Records a launched step, or one behind which every later plan is ordered."""
        for chunk in plan.chunks:
            chunk.sequence.ahead += chunk.stop - chunk.start
        self._begun.append((plan, []))

    def land(self, plan: BatchPlan) -> None:
        """Completes the oldest step in flight and releases its deferred blocks; does nothing if none is in flight."""
        if not self._begun:
            return
        oldest, held = self._begun.popleft()
        assert oldest is plan, "steps are committed in the order in which they were begun"
        for chunk in plan.chunks:
            chunk.sequence.ahead -= chunk.stop - chunk.start
        for blocks in held:
            self._pool.release(blocks)

    def release(self, blocks: list[int]) -> None:
        """Releases blocks at once, or as soon as no step in flight can use them."""
        if self._begun:
            self._begun[-1][1].append(blocks)
        else:
            self._pool.release(blocks)


def living(plan: BatchPlan) -> BatchPlan:
    """The plan without sequences that have ended; block clears and copies stay, for their blocks are still held."""
    chunks = tuple(chunk for chunk in plan.chunks if not chunk.sequence.ended)
    return BatchPlan(chunks, plan.started, plan.clear, plan.copies)
