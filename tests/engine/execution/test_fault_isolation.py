"""Log lines of a step that was retried row by row; tests/promises checks that only one request fails."""

from __future__ import annotations

import pytest

from app.common.types import BatchPlan, Chunk, Request, Sequence
from app.engine.execution.engine import FaultIsolation
from app.engine.sampling.sampler_io import StepResult


class FailsOnce:
    """A runner whose first step fails, with an error that quotes what a client has sent."""

    def __init__(self) -> None:
        self.steps = 0

    def run(self, plan: BatchPlan) -> StepResult:  # noqa: ARG002 - the protocol
        self.steps += 1
        if self.steps == 1:
            raise RuntimeError("a canary from a prompt")
        return StepResult()


def test_a_step_computed_row_by_row_is_told_by_type_and_place_without_a_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sequence = Sequence(request=Request(id="a", prompt=(1,), max_tokens=1), tokens=[1], arrival=0)
    isolation = FaultIsolation(FailsOnce())
    assert isolation.run(BatchPlan((Chunk(sequence, 0, 1),))) == StepResult()
    assert (
        "RuntimeError < tests/engine/execution/test_fault_isolation.py:" in caplog.text and "canary" not in caplog.text
    )
