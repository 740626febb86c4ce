"""Where requests wait while their guide is compiled, so that the steps of all others go on. Knows no queue, no pipe."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from app.engine.types import Failed, Request, StepReport
from app.faults import fault

_log = logging.getLogger("inkstream")
_FAILED = "the guide of this request could not be made ready; its id names the reason in the server's log"
_POLL_SECONDS = 0.002


class Door:
    """Owns one thread. Guided requests leave in the order in which they came; others do not wait for them."""

    def __init__(
        self, prepare: Callable[[Request], None], forget: Callable[[str], None], n_kept: Callable[[], int], *, most: int
    ) -> None:
        """`most` guides are kept for requests that have not begun; `n_kept` tells how many of those there are."""
        self._prepare = prepare
        self._forget = forget
        self._n_kept = n_kept
        self._most = most
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Request] = deque()
        self._compiled: deque[tuple[Request, Future[None]]] = deque()
        self._cancelled: set[str] = set()
        """Requests whose guide is being compiled although nobody waits for it any more."""
        self._failed: list[Failed] = []

    @property
    def n_waiting(self) -> int:
        """Requests that stand here."""
        return len(self._waiting) + len(self._compiled)

    def wait_seconds(self, otherwise: float) -> float:
        """How long the engine may sleep: not for long while somebody waits here."""
        return min(otherwise, _POLL_SECONDS) if self._waiting or self._compiled else otherwise

    def enter(self, request: Request) -> None:
        """Takes a request in."""
        self._waiting.append(request)
        self._compile()

    def leave(self) -> list[Request]:
        """Those that are ready now, and nobody before them waits."""
        ready = []
        while self._compiled and self._compiled[0][1].done():
            request, prepared = self._compiled.popleft()
            if request.id in self._cancelled:
                self._cancelled.discard(request.id)
                self._forget(request.id)
            elif error := prepared.exception():
                _log.error("request %s failed with its guide", request.id, exc_info=error)
                self._failed.append(Failed(request.id, _FAILED))
            else:
                ready.append(request)
        self._compile()
        return ready

    def take_failed(self) -> tuple[Failed, ...]:
        """Those whose guide could not be compiled for a reason that is not theirs; told once."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def settle(self, report: StepReport) -> None:
        """Forgets the guides of requests that have ended."""
        for request_id in [e.request_id for e in report.events if e.finish] + [f.request_id for f in report.failed]:
            self._forget(request_id)

    def cancel(self, request_id: str) -> None:
        """Forgets a request, here and where its guide is kept; no error where there is none."""
        for request in [request for request in self._waiting if request.id == request_id]:
            self._waiting.remove(request)
        for entry in [entry for entry in self._compiled if entry[0].id == request_id]:
            if entry[1].cancel():
                self._compiled.remove(entry)
            else:
                self._cancelled.add(request_id)
        self._forget(request_id)

    def _compile(self) -> None:
        while self._waiting and self._n_kept() + len(self._compiled) < self._most:
            request = self._waiting.popleft()
            self._compiled.append((request, self._thread.submit(self._prepare_one, request)))

    def _prepare_one(self, request: Request) -> None:
        fault("engine.guide", request)
        self._prepare(request)
