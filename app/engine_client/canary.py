"""Canary request: a short request, whose content no client controls, that shows that an engine works.

After a request is refused for a crash, the restarted engine gets it first and alone (ScheduledCanary). If the engine
crashes on it, no client's request is to blame; if it is answered, the engine works, even if no client has got a token
since: bad requests alone must not end the service. The service submits it to the pool when all recent requests failed
(app/serving/failure_monitor.py).
"""

from __future__ import annotations

import asyncio

from app.common.errors import EngineError
from app.common.ipc import Ready
from app.common.types import PromptScores, Request, RequestStarted, SampledEvent
from app.engine_client.open_sequences import OpenSequences, Writes
from app.engine_client.restart_policy import TOKENS_TO_CLEAR

CANARY_ID = "engine canary"
"""Id of an engine's canary request; no client's request has it, since it contains a space."""


class Canary(OpenSequences):
    """One canary request: two tokens after the token that starts a text."""

    __slots__ = ("_ended", "failure", "n_tokens")

    def __init__(self, ready: Ready, request_id: str = CANARY_ID) -> None:
        request = Request(
            id=request_id,
            prompt=(ready.start_id or 0,),
            source=(0,) if ready.has_encoder else (),
            max_tokens=min(TOKENS_TO_CLEAR, ready.context - 1),
        )
        super().__init__([request])
        self.n_tokens = 0
        self.failure: EngineError | None = None
        self._ended = asyncio.Event()

    async def wait_answered(self) -> None:
        """Waits until it has ended. Raises EngineError if it failed."""
        await self._ended.wait()
        if self.failure:
            raise self.failure

    def add_token(self, request_id: str, at: float, event: SampledEvent) -> None:  # noqa: ARG002
        """Counts a token; the last one answers the canary."""
        if request_id not in self._open:
            return
        if event.token is not None:
            self.n_tokens += 1
            self._generated[0].append(event.token)
        if event.finish:
            self._end()

    def add_start(self, at: float, started: RequestStarted) -> None:
        """Only tokens show that the engine works."""

    def add_scores(self, scores: PromptScores) -> None:
        """There are none: it does not ask for them."""

    def fail(self, error: EngineError) -> None:
        """Ends the canary with an error."""
        if self._open:
            self.failure = error
            self._end()

    def flush(self, writes: Writes) -> None:
        """It has no reader."""

    def _end(self) -> None:
        self._open.clear()
        self._ended.set()


class ScheduledCanary:
    """The canary of one engine, whose replica owns it.

    scheduled --the engine is ready--> running --two tokens--> answered        a crash before that: scheduled again
    """

    def __init__(self) -> None:
        self._is_scheduled = False
        self._canary: Canary | None = None

    @property
    def n_steps(self) -> int:
        """Steps of this engine process that delivered a token to the canary request."""
        return self._canary.n_tokens if self._canary else 0

    def schedule(self) -> None:
        """Schedules a canary request, because a request was refused for a crash."""
        self._is_scheduled = True

    def start(self, ready: Ready) -> Canary | None:
        """Starts the canary on a ready engine; None if none is scheduled."""
        if not self._is_scheduled:
            return None
        self._is_scheduled, self._canary = False, Canary(ready)
        return self._canary

    def on_crash(self) -> list[str]:
        """Schedules an unanswered canary again; returns the ids of requests that were still open."""
        canary, self._canary = self._canary, None
        if not (canary and canary.is_open):
            return []
        self._is_scheduled = True
        return canary.open_ids
