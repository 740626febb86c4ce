"""One step of the engine: plan, run, commit.

Where the runner can launch a step and collect it later, the engine is one step ahead: the next step is planned and
launched while the device computes this one, which is collected and committed after that.

    step k      launch n+1 | collect n  -> commit n  -> report
    step k+1    launch n+2 | collect n+1 -> commit n+1 -> report
    device      ... n ------|------ n+1 ------|------ n+2 ...

A step that needs the host's own results first (guides, scores), or that could not be launched, waits until those before
it are committed, and is run as where nothing can be launched.

FaultIsolation retries a failed step row by row, so that only the request at fault fails. By batch invariance a chunk
gives the same result alone as in a batch, and computing it twice changes nothing: keys and values are written to the
same slots, and a grammar state that advanced too early is rebuilt from the tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from app.common.logs import trace_of
from app.common.types import BatchPlan, Chunk, Request, RequestStarted, Sequence, StepReport, TokenScore
from app.engine.memory.device_errors import is_out_of_memory, lost_device
from app.engine.sampling.sampler_io import SampledToken, StepResult
from app.engine.scheduling.block_allocator import living
from app.engine.scheduling.scheduler import BlockLeakCheck, Scheduler

_log = logging.getLogger("inkstream")
_FAILED = "the engine could not compute this request; its id names the reason in the server's log"
_NO_MEMORY = "there is not enough memory to compute this request: make the prompt shorter, or try later"


class Runs(Protocol):
    """What the engine needs of a runner; tests bring a fake one."""

    def run(self, plan: BatchPlan) -> StepResult:
        """Computes every chunk, after what the plan says must be done to blocks first."""
        ...


Flight = Any
"""Opaque handle of a launched step until it is collected."""


class RunsAhead(Protocol):
    """Optional ability of a runner: to launch a step while the previous one is still being computed.

    Steps are computed in the order of their launches, and collected in that order. A chunk of the second may read the
    token that the first draws, behind the last of Sequence.tokens: it lies on the device; if the logits
    were not finite, any value will do, since the result is discarded. The same goes for all rows of a sequence that
    has ended. run() is only called while nothing is in flight.
    """

    def launchable(self, plan: BatchPlan) -> bool:
        """Whether the step needs nothing from the host while it runs: no grammar, no scores."""
        ...

    def launch(self, plan: BatchPlan) -> Flight:
        """Begins with what run() would do, and never waits. What raises here leaves nothing of it in flight.

        What it needs of tokens and blocks it takes now: sequences change before the flight is collected.
        """
        ...

    def collect(self, flight: Flight) -> StepResult:
        """Waits for the oldest flight. An error here is not caused by a single request: it ends the process."""
        ...


class FaultIsolation:
    """Runs steps. Raises only errors that no single request caused: those end the process."""

    def __init__(
        self, runner: Runs, ahead: RunsAhead | None = None, *, release: Callable[[], None] = lambda: None
    ) -> None:
        """`release` gives back the memory that a failed step held; it raises where the device is lost."""
        self.retried = 0
        """Steps that were computed row by row."""
        self.grounded = 0
        """Steps that could not be launched, and were run instead."""
        self._runner = runner
        self._ahead = ahead
        self._release = release

    def launch(self, plan: BatchPlan) -> Flight | None:
        """None where the step must be run: by then nothing may be in flight."""
        if self._ahead is None or not self._ahead.launchable(plan):
            return None
        try:
            return self._ahead.launch(plan)
        except BaseException as error:
            _raise_unless_a_requests(error)
            problem = " < ".join(trace_of(error)[:2])
        self._release()
        self.grounded += 1
        if _is_worth_telling(self.grounded):
            _log.warning("%d steps could not be launched ahead, the last after %s", self.grounded, problem)
        return None

    def collect(self, flight: Flight) -> StepResult:
        """What came of a launched step."""
        assert self._ahead is not None, "nothing was launched"
        return self._ahead.collect(flight)

    def run(self, plan: BatchPlan) -> StepResult:
        """As the runner's; what cannot be computed alone either is in `failed`."""
        try:
            return self._runner.run(plan)
        except BaseException as error:
            _raise_unless_a_requests(error)
            # Only its place is kept: its frames hold the tensors of the step, and memory may be what was missing.
            problem = " < ".join(trace_of(error)[:2])
        self._release()
        self.retried += 1
        result = self._run_one_by_one(plan)
        if not result.failed and _is_worth_telling(self.retried):
            _log.warning("%d steps were computed row by row, the last after %s", self.retried, problem)
        return result

    def _run_one_by_one(self, plan: BatchPlan) -> StepResult:
        drawn: dict[str, SampledToken] = {}
        scores: dict[str, tuple[TokenScore, ...] | None] = {}
        failed: dict[str, str] = {}
        for chunk in plan.chunks:
            name = chunk.sequence.request.id
            try:
                result = self._runner.run(_alone(chunk, plan))
            except BaseException as error:
                _raise_unless_a_requests(error)
                failed[name] = _NO_MEMORY if is_out_of_memory(error) else _FAILED
                _log.error("request %s failed in the engine", name, exc_info=error)
            else:
                drawn |= result.drawn
                scores |= result.scores
                continue
            self._release()  # behind the except clause: until there the error holds what the row held
        if failed:
            self._prove(plan.chunks[0].sequence.request)
        return StepResult(drawn, scores, failed)

    def _prove(self, example: Request) -> None:
        """Raises where not even a sequence of one token can be computed: then no request is at fault."""
        request = Request(id="proof", prompt=(0,), max_tokens=1, source=example.source[:1])
        sequence = Sequence(request=request, tokens=[0], arrival=0)  # without blocks: it writes to the padding block
        self._runner.run(BatchPlan((Chunk(sequence, 0, 1),)))


def _alone(chunk: Chunk, plan: BatchPlan) -> BatchPlan:
    """The chunk with the preparation of its own blocks only: clearing other sequences' blocks would lose their data."""
    own = {*chunk.sequence.blocks}
    clear = tuple(block for block in plan.clear if block in own)
    copies = tuple(pair for pair in plan.copies if pair[1] in own)
    return BatchPlan((chunk,), clear=clear, copies=copies)


def _is_worth_telling(times: int) -> bool:
    """1, 2, 4, 8 ...: it may happen in every step."""
    return times & (times - 1) == 0


def _raise_unless_a_requests(error: BaseException) -> None:
    """Whether a request can be the cause: a panic of a library in Rust is no Exception, and can be one's, too."""
    if lost := lost_device(error):
        _log.critical("the device is lost: %s", lost)
        raise error
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


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
                sequence.waits_for_mask = bool(sequence.request.grammar) and self._masks.must_wait(sequence)

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
