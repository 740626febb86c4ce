"""One step of the engine: plan, run, commit.

If the runner can launch a step and collect it later, the engine runs one step ahead: it plans and launches the next
step while the device computes the current one, then collects and commits the current one.

    step k      launch n+1 | collect n  -> commit n  -> report
    step k+1    launch n+2 | collect n+1 -> commit n+1 -> report
    device      ... n ------|------ n+1 ------|------ n+2 ...

A step that needs the host (masks of grammars), or that could not be launched, waits until the previous steps are
committed and then runs synchronously.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from app.common.types import Request, RequestStarted, StepReport
from app.engine.execution.fault_isolation import FaultIsolation
from app.engine.execution.step_runner import AsyncStepRunner, StepHandle, StepRunner
from app.engine.scheduling.batch_plan import BatchPlan, StepResult, without_ended
from app.engine.scheduling.scheduler import Scheduler
from app.engine.speculation.speculation import Speculation
from app.engine.speculation.step_costs import StepCosts

if TYPE_CHECKING:  # it needs numpy, which the main loop of the process must not wait for
    from app.engine.guided.grammar_tracker import GrammarTracker


Announce = Callable[[tuple[RequestStarted, ...]], None]
_MASK_WAIT_SECONDS = 0.002
"""How long the engine waits for masks at a time while it has nothing else to compute."""


_MIN_STEPS, _BLOCKS_PER_STEP = 1000, 10
"""Steps between two checks of the blocks: at least 1,000, and one for each ten blocks; checking ten blocks takes a
microsecond, and all of them after every step would take more than a small model's step."""


class _NextStep(NamedTuple):
    """The step that is completed next; without a handle it was not launched and must be run."""

    plan: BatchPlan
    handle: StepHandle | None


class Engine:
    """Continuous batching: requests join and leave between any two steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        ahead: AsyncStepRunner | None = None,
        *,
        release: Callable[[], None] = lambda: None,
        masks: GrammarTracker | None = None,
    ) -> None:
        """`ahead` is the same runner if it can launch steps. `masks` knows which are ready; without it, all are.

        `release` frees the memory that a failed step held (app/engine/memory/memory_plan.py).
        """
        self.scheduler = scheduler
        self.runner = runner
        self.isolation = FaultIsolation(runner, ahead, release=release)
        self._ahead = ahead
        self._masks = masks
        self._costs: StepCosts | None = None
        self._has_guided = False
        """Whether a request with a grammar has come: before the first one no step asks for masks."""
        self._next: _NextStep | None = None
        self._has_marked = False
        self._unchecked_steps = 0
        self._check_interval = max(_MIN_STEPS, scheduler.pool.total // _BLOCKS_PER_STEP)

    @property
    def has_work(self) -> bool:
        """Whether step() has work to do; true also while all sequences of a step in flight have ended."""
        return self.scheduler.has_work

    def speculate(self, speculation: Speculation) -> None:
        """From now on steps verify drafts. Only for runners that compute one step at a time."""
        assert self._ahead is None
        self._costs = speculation.costs
        self.scheduler.draft_planner = speculation

    def add(self, request: Request) -> None:
        """Queues a request."""
        self._has_guided = self._has_guided or bool(request.grammar)
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> None:
        """Drops a request; later steps leave it out, steps in flight continue unchanged."""
        self.scheduler.cancel(request_id)

    def step(self, announce: Announce = lambda _started: None) -> StepReport:
        """Computes one step; calls `announce` with requests that leave the queue, before their computation starts.

        If all requests wait for masks, it waits briefly for one of them instead.
        """
        if self._next is None:
            self._mark_pending_masks()
            self._next = self._start(self.scheduler.plan(), announce)
        first, self._next = self._next, None
        if not first.plan.chunks:
            assert self._masks, "the plan is empty, but no sequence waits for a mask"
            self._masks.wait(_MASK_WAIT_SECONDS)
            return StepReport(counters=self.scheduler.counters)
        # Launch the next step before the result of this one is ready, so that the device never idles.
        if first.handle is not None:
            self._mark_pending_masks()
            if plan := self.scheduler.plan_ahead():
                self._next = self._start(plan, announce)
        report = self.scheduler.commit(first.plan, self._timed(first) if self._costs else self._finish(first))
        self._unchecked_steps += 1
        if self._unchecked_steps >= self._check_interval:
            self.check_blocks()
        return report

    def check_blocks(self) -> None:
        """Checks the accounting of cache blocks if there was a step since the last check; also called when idle."""
        if self._unchecked_steps:
            self._unchecked_steps = 0
            self.scheduler.check_blocks()

    def _mark_pending_masks(self) -> None:
        """Marks the sequences that the next step leaves out: their masks are late or cost too much."""
        if self._masks and self._has_guided:
            running = self.scheduler.running
            waits = self._masks.must_wait(running)
            if self._has_marked or any(waits):
                for sequence, must_wait in zip(running, waits, strict=True):
                    sequence.waits_for_mask = must_wait
                self._has_marked = any(waits)

    def _start(self, plan: BatchPlan, announce: Announce) -> _NextStep:
        if plan.started:
            announce(plan.started)
        if not self._ahead or not plan.chunks:
            return _NextStep(plan, None)
        handle = self.isolation.launch(plan)
        self.scheduler.mark_launched(plan)
        return _NextStep(plan, handle)

    def _timed(self, step: _NextStep) -> StepResult:
        """Finishes a step; if it only decodes, `costs` learns how long that took."""
        assert self._costs
        rows = 0
        for chunk in step.plan.chunks:
            n_rows = chunk.stop - chunk.start
            if n_rows != 1 + len(chunk.drafts):
                return self._finish(step)
            rows += n_rows
        started = time.perf_counter()
        result = self._finish(step)
        self._costs.observe(rows, time.perf_counter() - started)
        return result

    def _finish(self, step: _NextStep) -> StepResult:
        if step.handle is not None and self._ahead:
            return self._ahead.collect(step.handle)
        if not self._ahead:
            return self.isolation.run(step.plan)
        plan = without_ended(step.plan)
        return self.isolation.run(plan) if plan.chunks else StepResult()
