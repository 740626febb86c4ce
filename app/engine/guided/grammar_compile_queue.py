"""Holds guided requests until their grammars are compiled, so that the steps of others continue."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.common.types import Request, RequestFailed, StepReport
from app.engine.guided.grammar_workers import Job

if TYPE_CHECKING:  # it needs numpy, which the loop must not wait for
    from app.engine.guided.grammar_tracker import GrammarTracker


_log = logging.getLogger("inkstream")
_NOT_COMPILED = (
    "the guide of this request could not be compiled; the server's log gives the reason under the request's id"
)
_COMPILE_POLL_SECONDS = 0.002


@dataclass(slots=True)
class _GuidedRequest:
    request: Request
    job: Job | None = None
    """None until there is capacity to compile the grammar."""


class GrammarCompileQueue:
    """First come, first served within a cache namespace; namespaces do not wait for one another."""

    def __init__(self, grammars: GrammarTracker, *, max_prepared: int) -> None:
        """At most `max_prepared` compiled grammars are kept for requests that have not started."""
        self._grammars = grammars
        self._max_prepared = max_prepared
        self._queues: dict[str, deque[_GuidedRequest]] = {}
        self._failed: list[RequestFailed] = []
        self._is_used = False
        """Whether a guided request has come: before the first one there is nothing to report or to drop."""

    @property
    def n_waiting(self) -> int:
        """Number of requests in this queue."""
        return sum(map(len, self._queues.values()))

    def wait_seconds(self, otherwise: float) -> float:
        """How long the engine may sleep: only briefly while a grammar is being compiled."""
        return min(otherwise, _COMPILE_POLL_SECONDS) if self._queues else otherwise

    def add(self, request: Request) -> None:
        """Adds a request."""
        self._is_used = True
        self._queues.setdefault(request.cache_namespace, deque()).append(_GuidedRequest(request))
        self._compile()

    def pop_ready(self) -> list[Request]:
        """Removes and returns the requests whose grammars are compiled."""
        if not self._queues:
            return []
        ready = []
        for queue in self._queues.values():
            while queue and queue[0].job and queue[0].job.done:
                request, error = queue[0].request, queue[0].job.error
                queue.popleft()
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
            for entry in [entry for entry in queue if entry.request.id == request_id]:
                queue.remove(entry)
        self._grammars.forget(request_id)
        self._compile()

    def _compile(self) -> None:
        """Starts to compile as many grammars as there is capacity for, round robin among namespaces."""
        self._queues = {namespace: queue for namespace, queue in self._queues.items() if queue}
        waiting = {namespace: deque(e for e in queue if not e.job) for namespace, queue in self._queues.items()}
        while any(waiting.values()):
            for namespace, queue in waiting.items():
                if queue and self._grammars.n_prepared >= self._max_prepared - self._reserved(namespace):
                    queue.clear()
                if queue:
                    entry = queue.popleft()
                    entry.job = self._grammars.prepare(entry.request)

    def _reserved(self, namespace: str) -> int:
        """Capacity that a namespace leaves to others: the last eighth, if it already has a grammar here."""
        has_grammar = any(entry.job for entry in self._queues[namespace])
        return self._max_prepared // 8 if namespace and has_grammar else 0
