"""Queue of guided requests whose grammars are being compiled, so that the steps of all others go on."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from app.common.types import Request, RequestFailed, StepReport
from app.engine.guided.grammar_workers import Job

_log = logging.getLogger("inkstream")
_FAILED = "the guide of this request could not be made ready; its id names the reason in the server's log"
_POLL_SECONDS = 0.002


class PreparesGrammars(Protocol):
    """What the engine's loop and this queue ask of grammar_tracker.py."""

    @property
    def n_prepared(self) -> int:
        """Grammars that are kept for requests that have not begun."""
        ...

    def prepare(self, request: Request) -> Job:
        """Starts to compile a request's grammar."""
        ...

    def forget(self, request_id: str) -> None:
        """Drops a request's grammar; no error where there is none."""
        ...

    def take_work(self) -> tuple[tuple[str, float], ...]:
        """For StepReport.work."""
        ...


@dataclass(slots=True)
class _Entry:
    request: Request
    job: Job | None = None
    """None until there is capacity to compile the grammar."""


class GrammarCompileQueue:
    """First come, first served within a cache namespace; namespaces do not wait for one another."""

    def __init__(self, guides: PreparesGrammars, *, most: int) -> None:
        """At most `most` compiled grammars are kept for requests that have not begun."""
        self._guides = guides
        self._most = most
        self._lanes: dict[str, deque[_Entry]] = {}
        self._failed: list[RequestFailed] = []

    @property
    def n_waiting(self) -> int:
        """Requests in this queue."""
        return sum(map(len, self._lanes.values()))

    def wait_seconds(self, otherwise: float) -> float:
        """How long the engine may sleep: not for long while a grammar is being compiled."""
        return min(otherwise, _POLL_SECONDS) if self._lanes else otherwise

    def enter(self, request: Request) -> None:
        """Adds a request."""
        self._lanes.setdefault(request.cache_namespace, deque()).append(_Entry(request))
        self._compile()

    def leave(self) -> list[Request]:
        """Removes and returns the requests whose grammars are compiled."""
        if not self._lanes:
            return []
        ready = []
        for lane in self._lanes.values():
            while lane and lane[0].job and lane[0].job.done:
                request, error = lane[0].request, lane[0].job.error
                lane.popleft()
                if error:
                    _log.error("request %s failed with its guide", request.id, exc_info=error)
                    self._failed.append(RequestFailed(request.id, _FAILED))
                    self._guides.forget(request.id)
                else:
                    ready.append(request)
        self._compile()
        return ready

    def take_failed(self) -> tuple[RequestFailed, ...]:
        """Requests whose grammars could not be compiled for a reason that is not theirs; reported once."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def take_work(self) -> tuple[tuple[str, float], ...]:
        """CPU seconds by request, for StepReport.work."""
        return self._guides.take_work()

    def settle(self, report: StepReport) -> None:
        """Forgets the grammars of requests that have ended."""
        for request_id in [e.request_id for e in report.events if e.finish] + [f.request_id for f in report.failed]:
            self._guides.forget(request_id)

    def cancel(self, request_id: str) -> None:
        """Forgets a request and its grammar; no error where there is none."""
        for lane in self._lanes.values():
            for entry in [entry for entry in lane if entry.request.id == request_id]:
                lane.remove(entry)
        self._guides.forget(request_id)
        self._compile()

    def _compile(self) -> None:
        """Starts as many as there is capacity for, namespaces in turn."""
        self._lanes = {salt: lane for salt, lane in self._lanes.items() if lane}
        waiting = {salt: deque(e for e in lane if not e.job) for salt, lane in self._lanes.items()}
        while any(waiting.values()):
            for salt, lane in waiting.items():
                if lane and self._guides.n_prepared >= self._most - self._reserved(salt):
                    lane.clear()
                if lane:
                    entry = lane.popleft()
                    entry.job = self._guides.prepare(entry.request)

    def _reserved(self, salt: str) -> int:
        """Capacity that a namespace leaves to others: the last eighth, where it has anything here already."""
        has_any = any(entry.job for entry in self._lanes[salt])
        return self._most // 8 if salt and has_any else 0
