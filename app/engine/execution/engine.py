"""One step of the engine: plan, run, commit.

If the runner can launch a step and collect it later, the engine runs one step ahead: it plans and launches the next
step while the device computes the current one, then collects and commits the current one.

    step k      launch n+1 | collect n  -> commit n  -> report
    step k+1    launch n+2 | collect n+1 -> commit n+1 -> report
    device      ... n ------|------ n+1 ------|------ n+2 ...

A step that needs the host (masks of grammars), or that could not be launched, waits until the previous steps are
committed and then runs synchronously.

FaultIsolation retries a failed step row by row, so that only the request at fault fails. By batch invariance a
chunk gives the same result alone as in a batch, and computing it twice changes nothing: keys and values are written to
the same slots, and a grammar state that advanced too early is rebuilt from the tokens.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from app.common.logs import trace_of
from app.common.types import Request, RequestStarted, StepReport, TokenScore
from app.engine.memory.device_errors import is_out_of_memory, lost_device
from app.engine.sampling.sampled_token import SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence, StepResult
from app.engine.scheduling.block_allocator import without_ended
from app.engine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:  # it needs numpy, which the main loop of the process must not wait for
    from app.engine.guided.grammar_tracker import GrammarTracker

_log = logging.getLogger("inkstream")
_FAILED = "the engine could not compute this request; the server's log gives the reason under the request's id"
_NO_MEMORY = "there is not enough memory to compute this request: make the prompt shorter, or try later"


class StepRunner(Protocol):
    """Runs a step synchronously; tests use fakes."""

    def run(self, plan: BatchPlan) -> StepResult:
        """Clears and copies blocks as planned, then computes every chunk."""
        ...


StepHandle = Any
"""Opaque handle of a launched step until it is collected."""


class AsyncStepRunner(Protocol):
    """Launches a step while the device still computes the previous one.

    Steps are computed and collected in launch order. A chunk of the second step may read the token that the first one
    samples, at the position after the last of Sequence.tokens: that token is on the device only. If its logits were not
    finite, any value will do, because the result is discarded; the same holds for all rows of a sequence that has
    ended. run() is only called while no step is in flight.
    """

    def launchable(self, plan: BatchPlan) -> bool:
        """Whether the step needs nothing of the steps before it from the host, as a grammar's mask does."""
        ...

    def launch(self, plan: BatchPlan) -> StepHandle:
        """Starts what run() would do, without waiting. If it raises, no part of the step is in flight.

        It reads tokens and blocks now, because sequences change before the step is collected.
        """
        ...

    def collect(self, handle: StepHandle) -> StepResult:
        """Waits for the oldest step in flight. An error here is not caused by a single request: it ends the process."""
        ...


class FaultIsolation:
    """Runs steps. Raises only errors that no single request caused; they end the process."""

    def __init__(
        self, runner: StepRunner, ahead: AsyncStepRunner | None = None, *, release: Callable[[], None] = lambda: None
    ) -> None:
        """`release` frees the memory that a failed step held; it raises if the device is lost."""
        self.retried_steps = 0
        """Steps that were computed row by row."""
        self.failed_launches = 0
        """Steps that could not be launched and were run synchronously instead."""
        self._runner = runner
        self._ahead = ahead
        self._release = release

    def launch(self, plan: BatchPlan) -> StepHandle | None:
        """Launches the step; None if it must be run instead, once no other step is in flight."""
        if self._ahead is None or not self._ahead.launchable(plan):
            return None
        try:
            return self._ahead.launch(plan)
        except BaseException as error:
            _reraise_unless_request_at_fault(error)
            problem = " < ".join(trace_of(error)[:2])
        self._release()
        self.failed_launches += 1
        if _is_power_of_two(self.failed_launches):
            _log.warning("%d steps could not be launched ahead, the last after %s", self.failed_launches, problem)
        return None

    def run(self, plan: BatchPlan) -> StepResult:
        """Runs a step; requests that cannot be computed even alone are in `failed` of the result."""
        try:
            return self._runner.run(plan)
        except BaseException as error:
            _reraise_unless_request_at_fault(error)
            # Keep its location only: its frames hold the step's tensors, and the error may be a lack of memory.
            problem = " < ".join(trace_of(error)[:2])
        self._release()
        self.retried_steps += 1
        result = self._run_one_by_one(plan)
        if not result.failed and _is_power_of_two(self.retried_steps):
            _log.warning("%d steps were computed row by row, the last after %s", self.retried_steps, problem)
        return result

    def _run_one_by_one(self, plan: BatchPlan) -> StepResult:
        sampled: dict[str, tuple[SampledToken, ...]] = {}
        scores: dict[str, tuple[TokenScore, ...] | None] = {}
        failed: dict[str, str] = {}
        for chunk in plan.chunks:
            request_id = chunk.sequence.request.id
            try:
                result = self._runner.run(_alone(chunk, plan))
            except BaseException as error:
                _reraise_unless_request_at_fault(error)
                failed[request_id] = _NO_MEMORY if is_out_of_memory(error) else _FAILED
                _log.error("request %s failed in the engine", request_id, exc_info=error)
            else:
                sampled |= result.sampled
                scores |= result.scores
                continue
            self._release()  # after the except clause, inside which the error still references the step's tensors
        if failed:
            self._run_probe(plan.chunks[0].sequence.request)
        return StepResult(sampled, scores, failed)

    def _run_probe(self, example: Request) -> None:
        """Raises if even a sequence of one token cannot be computed: then no request is at fault."""
        request = Request(id="probe", prompt=(0,), max_tokens=1, source=example.source[:1])
        # Without blocks: it writes to the padding block.
        sequence = Sequence(request=request, tokens=array("q", [0]), arrival=0)
        self._runner.run(BatchPlan((Chunk(sequence, 0, 1),)))


def _alone(chunk: Chunk, plan: BatchPlan) -> BatchPlan:
    """The chunk with the preparation of its own blocks only: clearing other sequences' blocks would lose their data."""
    own = {(group, block) for group, blocks in enumerate(chunk.sequence.blocks) for block in blocks}
    clear = tuple(cleared for cleared in plan.clear if cleared in own)
    copies = tuple(copy for copy in plan.copies if (copy[0], copy[2]) in own)
    return BatchPlan((chunk,), clear=clear, copies=copies)


def _is_power_of_two(count: int) -> bool:
    """Limits repeated log lines to occurrences 1, 2, 4, 8 ...: the event may happen in every step."""
    return count & (count - 1) == 0


def _reraise_unless_request_at_fault(error: BaseException) -> None:
    """Raises errors that no request can cause. A request can cause a panic in a Rust library, which is no Exception."""
    if lost := lost_device(error):
        _log.critical("the device is lost: %s", lost)
        raise error
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


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
        report = self.scheduler.commit(first.plan, self._finish(first))
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

    def _finish(self, step: _NextStep) -> StepResult:
        if step.handle is not None and self._ahead:
            return self._ahead.collect(step.handle)
        if not self._ahead:
            return self.isolation.run(step.plan)
        plan = without_ended(step.plan)
        return self.isolation.run(plan) if plan.chunks else StepResult()
