"""Holds guided requests until their grammars are compiled, so that the steps of others continue."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.common.fair_turns import FairTurns, may_hold
from app.common.types import Request, RequestFailed, StepReport
from app.engine.guided.grammar_workers import Job

if TYPE_CHECKING:  # it needs numpy, which the loop must not wait for
    from app.engine.guided.grammar_tracker import GrammarTracker


_log = logging.getLogger("inkstream")
_NOT_COMPILED = (
    "the guide of this request could not be compiled; the server's log gives the reason under the request's id"
)
_COMPILE_POLL_SECONDS = 0.002
_NAMESPACE_FACTOR = 7
"""A namespace may prepare seven times as many grammars as there is capacity left: seven eighths if it is alone."""
_TURN = 1.0


@dataclass(slots=True, eq=False)
class _SubQueue:
    """Requests of one namespace, the oldest first."""

    compiling: deque[tuple[Request, Job]] = field(default_factory=deque)
    """Those whose grammars are being compiled, or are compiled while an older request's is not."""
    waiting: deque[Request] = field(default_factory=deque)
    """Those for whose grammars there is no capacity yet."""

    @property
    def length(self) -> int:
        return len(self.compiling) + len(self.waiting)


class GrammarCompileQueue:
    """First come, first served within a cache namespace; namespaces take turns, and do not wait for one another.

    A turn is one grammar, whatever it costs: the threads that compile them take turns by CPU time.
    """

    def __init__(self, grammars: GrammarTracker, *, max_prepared: int) -> None:
        """At most `max_prepared` compiled grammars are kept for requests that have not started."""
        self._grammars = grammars
        self._max_prepared = max_prepared
        self._queues: dict[str, _SubQueue] = {}
        self._turns = FairTurns[_SubQueue]()
        """Those with requests that wait for capacity."""
        self._failed: list[RequestFailed] = []
        self._is_used = False
        """Whether a guided request has come: before the first one there is nothing to report or to drop."""

    @property
    def n_waiting(self) -> int:
        """Number of requests in this queue."""
        return sum(queue.length for queue in self._queues.values())

    def wait_seconds(self, otherwise: float) -> float:
        """How long the engine may sleep: only briefly while a grammar is being compiled."""
        return min(otherwise, _COMPILE_POLL_SECONDS) if self._queues else otherwise

    def add(self, request: Request) -> None:
        """Adds a request."""
        self._is_used = True
        queue = self._queues.setdefault(request.cache_namespace, _SubQueue())
        queue.waiting.append(request)
        if len(queue.waiting) == 1:
            self._turns.wait(queue, _TURN)
        self._compile()

    def pop_ready(self) -> list[Request]:
        """Removes and returns the requests whose grammars are compiled."""
        if not self._queues:
            return []
        ready = []
        for queue in self._queues.values():
            while queue.compiling and queue.compiling[0][1].done:
                request, job = queue.compiling.popleft()
                error = job.error
                if error:
                    _log.error("compiling the grammar of request %s failed", request.id, exc_info=error)
                    self._failed.append(RequestFailed(request.id, _NOT_COMPILED))
                    self._grammars.forget(request.id)
                else:
                    ready.append(request)
        self._compile()
        return ready

    def take_failed(self) -> tuple[RequestFailed, ...]:
        """Returns and resets the requests whose grammars could not be compiled because of an internal error."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def take_work(self) -> tuple[tuple[str, float], ...]:
        """CPU seconds by request, for StepReport.work."""
        return self._grammars.take_work() if self._is_used else ()

    def release_finished(self, report: StepReport) -> None:
        """Drops the grammars of requests that have ended."""
        if not self._is_used:
            return
        for request_id in [e.request_id for e in report.events if e.finish] + [f.request_id for f in report.failed]:
            self._grammars.forget(request_id)

    def cancel(self, request_id: str) -> None:
        """Drops a request and its grammar, if there are any."""
        if not self._is_used:
            return
        for queue in self._queues.values():
            queue.compiling = deque(entry for entry in queue.compiling if entry[0].id != request_id)
            n_before = len(queue.waiting)
            queue.waiting = deque(request for request in queue.waiting if request.id != request_id)
            if n_before and not queue.waiting:
                self._turns.leave(queue)
        self._grammars.forget(request_id)
        self._compile()

    def _compile(self) -> None:
        """Starts to compile as many grammars as there is capacity for, in turns of namespaces."""
        while queue := next(filter(self._has_capacity, self._turns), None):
            request = queue.waiting.popleft()
            queue.compiling.append((request, self._grammars.prepare(request)))
            self._turns.take(queue, _TURN if queue.waiting else None)
        self._queues = {namespace: queue for namespace, queue in self._queues.items() if queue.length}

    def _has_capacity(self, queue: _SubQueue) -> bool:
        free = self._max_prepared - self._grammars.n_prepared
        is_shared = bool(queue.waiting[0].cache_namespace)
        return free > 0 and (not is_shared or may_hold(len(queue.compiling), 1, free, factor=_NAMESPACE_FACTOR))
