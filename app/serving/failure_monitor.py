"""Detects that the service fails every request, and reports it through /health/ready.

healthy --the last FAILURES requests all failed with server errors--> suspected --the canary fails--> failing
   ^                                                                     |                              |
   +-------------------- any request succeeds, or the canary does -------+------------------------------+

Failures alone prove nothing: one client may send the same poisoned request again and again. So a canary request, whose
content no client controls, confirms them: the one that an engine gets after a crash (app/engine_client/canary.py), but
from the queue. It runs at most once in RECHECK_SECONDS, and only while failures are unexplained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

_log = logging.getLogger("inkstream")
FAILURES = 8
RECHECK_SECONDS = 2.0
_PROBLEM = (
    "the last requests failed on the server's side, and so does a canary request: the log names the reason; load "
    "working weights (kill -HUP) or restart the service"
)


class FailureMonitor:
    """Health state from recent outcomes; owned by the service, which runs run() as one task."""

    def __init__(self, canary: Callable[[], Awaitable[bool | None]]) -> None:
        """`canary` runs a request through the service; returns whether it succeeded, or None if that is unknown."""
        self.problem = ""
        """Why the service is not ready; empty while it is healthy."""
        self._canary = canary
        self._failures = 0
        self._is_suspected = asyncio.Event()

    def record_success(self) -> None:
        """A request succeeded."""
        self._failures = 0
        self._is_suspected.clear()
        if self.problem:
            self.problem = ""
            _log.info("answers succeed again: the service is ready")

    def record_failure(self) -> None:
        """A request failed through the server's fault."""
        self._failures += 1
        if self._failures >= FAILURES:
            self._is_suspected.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._is_suspected.wait()
            succeeded = await self._canary()
            # A request may have succeeded while the canary ran.
            if succeeded:
                self.record_success()
            elif succeeded is False and self._is_suspected.is_set() and not self.problem:
                self.problem = _PROBLEM
                _log.error("not ready: the last %d answers failed, and so does a canary request", self._failures)
            await asyncio.sleep(RECHECK_SECONDS)
