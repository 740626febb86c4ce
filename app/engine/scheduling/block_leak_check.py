"""Checks the accounting of cache blocks in production; violations are counted and logged.

Checking every block after every step would cost more than a small model's step, so it runs every so many steps, and
once when the engine becomes idle.
"""

from __future__ import annotations

import logging

from app.engine.scheduling.scheduler import Scheduler

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
