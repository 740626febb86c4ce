"""One step of the engine: plan, run, commit. No threads, no asyncio, no pipe."""

from __future__ import annotations

from collections.abc import Callable

from app.engine.audit import Audit
from app.engine.isolation import Isolation, Runs
from app.engine.scheduler import Scheduler
from app.engine.types import Request, Started, StepReport


class Engine:
    """Continuous batching: requests join and leave between any two steps."""

    def __init__(self, scheduler: Scheduler, runner: Runs) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.isolation = Isolation(runner)
        self._audit = Audit(scheduler)

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
        report = self.scheduler.commit(plan, self.isolation.run(plan))
        self._audit.after_step()
        return report

    def rest(self) -> None:
        """For whoever has no work for now: time to look whether all is in order."""
        self._audit.when_idle()
