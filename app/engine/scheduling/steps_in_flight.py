"""Steps that were launched but not committed; defers the release of blocks that they may still use.

Between a step's launch and its commit, the device may write to the step's blocks and copy from others at any time.
When a sequence ends or is cancelled in that window, its blocks are released only after the most recent step in flight
commits, so a block that a step may still use is never reallocated.

    launch(n)  launch(n+1)  commit(n): a sequence ends   commit(n+1)
       |            |              | release is deferred    | its blocks are free
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items

from app.engine.scheduling.batch_plan import BatchPlan
from app.engine.scheduling.block_pool import BlockPool

BlockTable = tuple["array[int]", ...]
"""Blocks of a sequence: an array for each cache group."""


class StepsInFlight:
    """Launched steps in launch order, which is also the order of their commits."""

    def __init__(self, pools: Items[BlockPool]) -> None:
        self._pools = pools
        self._steps: deque[tuple[BatchPlan, list[BlockTable]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def deferred(self) -> Iterator[BlockTable]:
        """Blocks without an owner that are not released yet."""
        return (table for _, deferred in self._steps for table in deferred)

    def add(self, plan: BatchPlan) -> None:
        """Records a step that was launched, or that runs next and precedes every later plan."""
        for chunk in plan.chunks:
            chunk.sequence.ahead += chunk.stop - chunk.start
        self._steps.append((plan, []))

    def complete(self, plan: BatchPlan) -> None:
        """Completes the oldest step in flight and releases its deferred blocks; does nothing if none is in flight."""
        if not self._steps:
            return
        oldest, deferred = self._steps.popleft()
        assert oldest is plan, "steps are committed in the order in which they were launched"
        for chunk in plan.chunks:
            chunk.sequence.ahead -= chunk.stop - chunk.start
        for table in deferred:
            self.release_now(table)

    def release(self, table: BlockTable) -> None:
        """Releases blocks at once, or as soon as no step in flight can use them."""
        if self._steps:
            self._steps[-1][1].append(table)
        else:
            self.release_now(table)

    def release_now(self, table: BlockTable) -> None:
        """Releases blocks that no step in flight uses."""
        for pool, blocks in zip(self._pools, table, strict=False):  # a sequence that does not run has none
            pool.release(pool.held(blocks))
