"""Protocols of runners: a runner turns the plan of a step into its result, at once or one step ahead."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from app.engine.scheduling.batch_plan import BatchPlan, StepResult


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


class BackendRunners(NamedTuple):
    """The runner of an engine (app/engine/execution/engine.py), also as `ahead` if it can launch steps."""

    runner: StepRunner
    ahead: AsyncStepRunner | None = None
