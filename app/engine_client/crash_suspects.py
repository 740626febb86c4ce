"""Order of an engine's requests after a crash: suspects are sent one at a time, and refused after two crashes.

A crash is a pause: the client keeps the prompt and the delivered tokens of every open request, and submits them to the
next engine process (supervisor.py). A request is in flight from when it is sent until it ends, and a crash makes all
requests in flight suspects. They are sent to the next engine process one at a time, each only after the previous one is
cleared: it has made two steps of progress (a token after its prompt was read, and one after that) or has ended. So the
next crash has a single new suspect. A request that was in flight in two crashes in a row, without being cleared in
between, is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from app.engine_client.restart_policy import TOKENS_TO_CLEAR

_MAX_REQUEST_CRASHES = 2

Progress = Callable[[str], int]
"""Progress of a request so far, a monotonic number."""


@dataclass(slots=True)
class _TrackedRequest:
    """One open request of an engine. Owned by CrashSuspects."""

    crash_count: int = 0
    """Consecutive crashes in which it was in flight without being cleared in between."""
    progress_when_sent: int = 0


class CrashSuspects:
    """Tracks the requests of one engine, in the order of sending: in flight, or suspects that wait for their trial."""

    def __init__(self) -> None:
        self._requests: dict[str, _TrackedRequest] = {}
        self._waiting: dict[str, None] = {}
        """Suspects that are to be sent, in order; the values are unused."""
        self._trial: str | None = None

    @property
    def n_suspects(self) -> int:
        """Number of suspects that are not cleared yet."""
        return len(self._waiting) + (self._trial is not None)

    @property
    def n_in_flight(self) -> int:
        """Number of requests that the engine has."""
        return len(self._requests) - len(self._waiting)

    def add(self, request_id: str, progress: int) -> None:
        """Adds a request that is sent now."""
        self._requests[request_id] = _TrackedRequest(progress_when_sent=progress)

    def add_suspect(self, request_id: str, crash_count: int) -> None:
        """Adds a request that was in flight in earlier crashes; pop_next() decides when it is sent."""
        self._requests[request_id] = _TrackedRequest(crash_count=crash_count)
        self._waiting[request_id] = None

    def add_first(self, request_id: str) -> None:
        """Adds a request that is no suspect, but is sent before all suspects and alone."""
        self._requests[request_id] = _TrackedRequest()
        self._waiting = {request_id: None, **self._waiting}

    def crash_count(self, request_id: str) -> int:
        """Consecutive crashes that it was in flight in; for add_suspect() when it is submitted again."""
        return self._requests[request_id].crash_count if request_id in self._requests else 0

    def update_trial(self, progress: Progress) -> None:
        """Ends the trial of a request that is cleared."""
        if self._trial is not None and self._is_cleared(self._trial, progress):
            self._trial = None

    def pop_next(self, progress: Progress) -> str | None:
        """Returns the suspect to send now, whose trial begins; None if there is none, or another's trial goes on."""
        if self._trial is None and self._waiting:
            self._trial = next(iter(self._waiting))
            del self._waiting[self._trial]
            self._requests[self._trial].progress_when_sent = progress(self._trial)
            return self._trial
        return None

    def remove(self, request_id: str) -> None:
        """Removes a request that has ended or was cancelled."""
        self._requests.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if self._trial == request_id:
            self._trial = None

    def on_crash(self, progress: Progress) -> list[str]:
        """Makes all requests suspects; returns those to refuse, which must be removed with remove()."""
        for request_id, request in self._requests.items():
            if request_id not in self._waiting:
                request.crash_count = 1 if self._is_cleared(request_id, progress) else request.crash_count + 1
        self._trial, self._waiting = None, dict.fromkeys(self._requests)
        return [
            request_id for request_id, request in self._requests.items() if request.crash_count >= _MAX_REQUEST_CRASHES
        ]

    def _is_cleared(self, request_id: str, progress: Progress) -> bool:
        return progress(request_id) - self._requests[request_id].progress_when_sent >= TOKENS_TO_CLEAR
