"""One step of the engine: plan, run, commit.

Where the runner can launch a step and collect it later, the engine is one step ahead: the next step is planned and
launched while the device computes this one, which is collected and committed after that.

    step k      launch n+1 | collect n  -> commit n  -> report
    step k+1    launch n+2 | collect n+1 -> commit n+1 -> report
    device      ... n ------|------ n+1 ------|------ n+2 ...

A step that needs the host's own results first (guides, scores), or that could not be launched, waits until those before
it are committed, and is run as where nothing can be launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from app.common.types import BatchPlan, Request, RequestStarted, Sequence, StepReport
from app.engine.execution.fault_isolation import FaultIsolation, Flight, Runs, RunsAhead
from app.engine.sampling.sampled_token import StepResult
from app.engine.scheduling.block_leak_check import BlockLeakCheck
from app.engine.scheduling.in_flight import living
from app.engine.scheduling.scheduler import Scheduler

Announce = Callable[[tuple[RequestStarted, ...]], None]
_MASK_WAIT_SECONDS = 0.002
"""How long the engine waits for masks at a time while it has nothing else to compute."""


class LateMasks(Protocol):
    """What the engine asks of app/engine/guided/grammar_tracker.py."""

    def must_wait(self, sequence: Sequence, /) -> bool:
        """Whether steps leave the sequence out until its mask is there."""
        ...

    def wait(self, seconds: float, /) -> None:
        """Waits for the next mask."""
        ...


class _Begun(NamedTuple):
    """A step that comes next, whatever happens; without a flight it is still to be run."""

    plan: BatchPlan
    flight: Flight | None


class Engine:
    """Continuous batching: requests join and leave between any two steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runs,
        ahead: RunsAhead | None = None,
        *,
        release: Callable[[], None] = lambda: None,
        masks: LateMasks | None = None,
    ) -> None:
        """`ahead` is the same runner, where it can launch steps. Without `masks` no mask is ever late.

        `release` gives back the memory that a failed step held (app/engine/memory/device_memory.py).
        """
        self.scheduler = scheduler
        self.runner = runner
        self.isolation = FaultIsolation(runner, ahead, release=release)
        self._is_ahead = ahead is not None
        self._masks = masks
        self._next: _Begun | None = None
        self._audit = BlockLeakCheck(scheduler)

    @property
    def has_work(self) -> bool:
        """Whether step() would do anything, also while the sequences of a step in flight have all ended."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Drops a request; steps launched from now on leave it out, those in flight go on unchanged."""
        self.scheduler.cancel(request_id)

    def step(self, announce: Announce = lambda _started: None) -> StepReport:
        """Computes one batch; `announce` hears of requests that leave the queue before the work on them begins.

        Where all requests wait for masks, it waits for one of them for a moment.
        """
        first, self._next = self._next or self._begin(self._plan(), announce), None
        if not first.plan.chunks:
            assert self._masks, "a step without progress"
            self._masks.wait(_MASK_WAIT_SECONDS)
            return StepReport(counters=self.scheduler.counters)
        # Before the result of this one is there, so that the device has no pause.
        if first.flight is not None and (plan := self._plan_ahead()):
            self._next = self._begin(plan, announce)
        report = self.scheduler.commit(first.plan, self._finish(first))
        self._audit.after_step()
        return report

    def rest(self) -> None:
        """Runs the idle-time checks; called when there is no work."""
        self._audit.when_idle()

    def _plan(self) -> BatchPlan:
        self._mark_late()
        return self.scheduler.plan()

    def _plan_ahead(self) -> BatchPlan | None:
        self._mark_late()
        return self.scheduler.plan_ahead()

    def _mark_late(self) -> None:
        """Notes which sequences the next step leaves out."""
        if self._masks:
            for sequence in self.scheduler.running:
                sequence.waits_for_mask = bool(sequence.request.guide) and self._masks.must_wait(sequence)

    def _begin(self, plan: BatchPlan, announce: Announce) -> _Begun:
        if plan.started:
            announce(plan.started)
        if not self._is_ahead or not plan.chunks:
            return _Begun(plan, None)
        flight = self.isolation.launch(plan)
        self.scheduler.begin(plan)
        return _Begun(plan, flight)

    def _finish(self, begun: _Begun) -> StepResult:
        if begun.flight is not None:
            return self.isolation.collect(begun.flight)
        if not self._is_ahead:
            return self.isolation.run(begun.plan)
        plan = living(begun.plan)
        return self.isolation.run(plan) if plan.chunks else StepResult()
