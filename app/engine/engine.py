"""One step of the engine: plan, run, commit. No threads, no asyncio, no pipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from app.engine.scheduler import Scheduler
from app.engine.types import BatchPlan, Request, Started, StepReport, StepResult


class Runs(Protocol):
    """What the engine needs of a runner; tests bring a fake one."""

    def run(self, plan: BatchPlan) -> StepResult:
        """Computes every chunk, after what the plan says must be done to blocks first."""
        ...


class Engine:
    """Continuous batching: requests join and leave between any two steps."""

    def __init__(self, scheduler: Scheduler, runner: Runs) -> None:
        self.scheduler = scheduler
        self.runner = runner

    @property
    def has_work(self) -> bool:
        """Whether step() would do anything."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Drops a request; its blocks are free at once."""
        self.scheduler.cancel(request_id)

    def step(self, announce: Callable[[tuple[Started, ...]], None] = lambda _started: None) -> StepReport:
        """Computes one batch; `announce` hears of requests that leave the queue before the work on them begins."""
        plan = self.scheduler.plan()
        if plan.started:
            announce(plan.started)
        return self.scheduler.commit(plan, self.runner.run(plan))
