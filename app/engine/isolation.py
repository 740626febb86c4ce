"""A step in which something was raised, once more row by row: only the request at fault fails. Pure, knows no tensors.

By the law of rows a chunk gives alone what it gives beside others, and computing it twice changes nothing: keys and
values are written to the same places, and a guide that has moved on too early is built again from the tokens.
"""

from __future__ import annotations

import logging
from typing import Protocol

from app.engine.result import Drawn, StepResult
from app.engine.types import BatchPlan, Chunk, Request, Sequence, TokenScore
from app.logs import trace_of

_log = logging.getLogger("inkstream")
_FAILED = "the engine could not compute this request; its id names the reason in the server's log"
_NO_MEMORY = "there is not enough memory to compute this request: make the prompt shorter, or try later"


class Runs(Protocol):
    """What the engine needs of a runner; tests bring a fake one."""

    def run(self, plan: BatchPlan) -> StepResult:
        """Computes every chunk, after what the plan says must be done to blocks first."""
        ...


class Isolation:
    """Runs steps. Raises only what no single request is to blame for: that ends the process."""

    def __init__(self, runner: Runs) -> None:
        self.retried = 0
        """Steps that were computed row by row."""
        self._runner = runner

    def run(self, plan: BatchPlan) -> StepResult:
        """As the runner's; what cannot be computed alone either is in `failed`."""
        try:
            return self._runner.run(plan)
        except BaseException as error:
            if not _may_be_a_requests(error):
                raise
            # Only its place is kept: its frames hold the tensors of the step, and memory may be what was missing.
            problem = " < ".join(trace_of(error)[:2])
        self.retried += 1
        result = self._run_one_by_one(plan)
        if not result.failed and self.retried & (self.retried - 1) == 0:  # 1, 2, 4, 8 ...: it may happen in every step
            _log.warning("%d steps were computed row by row, the last after %s", self.retried, problem)
        return result

    def _run_one_by_one(self, plan: BatchPlan) -> StepResult:
        drawn: dict[str, Drawn] = {}
        scores: dict[str, tuple[TokenScore, ...] | None] = {}
        failed: dict[str, str] = {}
        for chunk in plan.chunks:
            name = chunk.sequence.request.id
            try:
                result = self._runner.run(_alone(chunk, plan))
            except BaseException as error:
                if not _may_be_a_requests(error):
                    raise
                failed[name] = _NO_MEMORY if _is_out_of_memory(error) else _FAILED
                _log.error("request %s failed in the engine", name, exc_info=error)
            else:
                drawn |= result.drawn
                scores |= result.scores
        if failed:
            self._prove(plan.chunks[0].sequence.request)
        return StepResult(drawn, scores, failed)

    def _prove(self, example: Request) -> None:
        """Raises where not even a sequence of one token can be computed: then no request is at fault."""
        request = Request(id="proof", prompt=(0,), max_tokens=1, source=example.source[:1])
        sequence = Sequence(request=request, tokens=[0], arrival=0)  # without blocks: it writes where nobody reads
        self._runner.run(BatchPlan((Chunk(sequence, 0, 1),)))


def _alone(chunk: Chunk, plan: BatchPlan) -> BatchPlan:
    """The chunk with what must be done to its own blocks first. Nobody else's may be cleared: they are written to."""
    own = {*chunk.sequence.blocks}
    clear = tuple(block for block in plan.clear if block in own)
    copies = tuple(pair for pair in plan.copies if pair[1] in own)
    return BatchPlan((chunk,), clear=clear, copies=copies)


def _may_be_a_requests(error: BaseException) -> bool:
    """Whether a request can be the cause: a panic of a library in Rust is no Exception, and can be one's, too."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _is_out_of_memory(error: BaseException) -> bool:
    """Python's own or torch's, which this file does not import."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
