"""Retries a failed step row by row, so that only the request at fault fails.

By batch invariance a chunk gives the same result alone as in a batch, and computing it twice changes nothing: keys and
values are written to the same slots, and a grammar state that advanced too early is rebuilt from the tokens.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable

from app.common.logs import trace_of
from app.common.types import Request, TokenScore
from app.engine.execution.step_runner import AsyncStepRunner, StepHandle, StepRunner
from app.engine.memory.device_errors import is_out_of_memory, lost_device
from app.engine.sampling.sampled_token import DRAFTS_NOT_FINITE, SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence, StepResult

_log = logging.getLogger("inkstream")
_FAILED = "the engine could not compute this request; the server's log gives the reason under the request's id"
_NO_MEMORY = "there is not enough memory to compute this request: make the prompt shorter, or try later"


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
            if chunk.drafts:  # they may be the reason, and may have left values that are not finite
                sampled[request_id] = (DRAFTS_NOT_FINITE,)
                continue
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
