"""Canary request of an engine: two tokens that show that a restarted engine works.

scheduled --an engine is ready--> running --two tokens--> answered        a crash before that: scheduled again

The canary request is sent first and alone. If the engine crashes on it, no client's request is to blame; if it is
answered, the engine works, even if no client has got a token since: bad requests alone must not end the service.
"""

from __future__ import annotations

from app.common.errors import EngineError
from app.common.ipc import Ready
from app.common.types import PromptScores, Request, RequestStarted, SampledEvent
from app.engine_client.open_sequences import OpenSequences, Writes
from app.engine_client.restart_policy import TOKENS_TO_CLEAR

CANARY_ID = "engine canary"
"""No client's request has this id, since it contains a space."""


class _Canary(OpenSequences):
    """The canary's one sequence; nobody reads its tokens."""

    __slots__ = ("n_tokens",)

    def __init__(self, request: Request) -> None:
        super().__init__([request])
        self.n_tokens = 0

    def add_token(self, request_id: str, at: float, event: SampledEvent) -> None:  # noqa: ARG002
        if event.token is not None and request_id in self._open:
            self.n_tokens += 1
            self._generated[0].append(event.token)
        if event.finish:
            self._open.clear()

    def add_start(self, at: float, started: RequestStarted) -> None:
        pass

    def add_scores(self, scores: PromptScores) -> None:
        pass

    def fail(self, error: EngineError) -> None:  # noqa: ARG002 - only that it ended counts
        self._open.clear()

    def flush(self, writes: Writes) -> None:
        pass


class CanaryRequest:
    """Canary request that confirms a restarted engine works. Owned by the replica of one engine."""

    def __init__(self) -> None:
        self._is_scheduled = False
        self._canary: _Canary | None = None

    @property
    def n_steps(self) -> int:
        """Steps of this engine process that delivered a token to the canary request."""
        return self._canary.n_tokens if self._canary else 0

    def schedule(self) -> None:
        """Schedules a canary request, because a request was refused for a crash."""
        self._is_scheduled = True

    def start(self, ready: Ready) -> OpenSequences | None:
        """Starts the canary on a ready engine; None if none is scheduled."""
        if not self._is_scheduled:
            return None
        request = Request(
            id=CANARY_ID,
            prompt=(ready.start_id or 0,),
            source=(0,) if ready.has_encoder else (),
            max_tokens=min(TOKENS_TO_CLEAR, ready.context - 1),
        )
        self._is_scheduled, self._canary = False, _Canary(request)
        return self._canary

    def on_crash(self) -> list[str]:
        """Schedules an unanswered canary again; returns the ids of requests that were still open."""
        canary, self._canary = self._canary, None
        if not (canary and canary.is_open):
            return []
        self._is_scheduled = True
        return canary.open_ids
