"""The queue in front of the engine as the API process sees it: who waits, how fast it moves. No pipe, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from app.engine.admission import QueueLimits, check_queue
from app.engine.types import Request

_LONGEST_INTERVAL, _MAX_RETRY_SECONDS = 60.0, 120.0


class WaitingLine:
    """Requests that were submitted and have not begun, by arrival."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._waiting: dict[str, int] = {}  # request id -> tokens to be read
        self._interval = 0.1  # seconds between two requests leaving the queue, smoothed
        self._last_start = 0.0

    @property
    def retry_after(self) -> int:
        """Whole seconds after which a refused request has a chance, from the rate at which the queue moves."""
        return int(min(_MAX_RETRY_SECONDS, max(1.0, self.eta_seconds(len(self._waiting)))))

    def check(self, requests: Sequence[Request]) -> None:
        """Raises QueueFull where these would break a bound now, InvalidRequest where they always would."""
        self.check_count(len(requests), sum(map(_tokens, requests)))

    def check_count(self, adding: int, adding_tokens: int = 0) -> None:
        """The same for so many requests, before their tokens are known."""
        check_queue(
            self.limits,
            waiting=len(self._waiting),
            waiting_tokens=sum(self._waiting.values()),
            adding=adding,
            adding_tokens=adding_tokens,
            retry_after=self.retry_after,
        )

    def join(self, request: Request) -> None:
        """One more at the end."""
        self._waiting[request.id] = _tokens(request)

    def begin(self, request_id: str, now: float) -> None:
        """A request leaves the queue because the engine has begun with it."""
        # An idle queue says nothing about how fast it moves.
        if len(self._waiting) > 1 and self._last_start:
            self._interval += 0.1 * (min(now - self._last_start, _LONGEST_INTERVAL) - self._interval)
        self._last_start = now
        self.leave(request_id)

    def leave(self, request_id: str) -> None:
        """A request is gone, whether it waited or not."""
        self._waiting.pop(request_id, None)

    def position(self, request_id: str) -> int | None:
        """Requests in front of this one, or None where it does not wait."""
        if request_id not in self._waiting:
            return None
        return next(place for place, waiting in enumerate(self._waiting) if waiting == request_id)

    def eta_seconds(self, position: int) -> float:
        """How long a request at this place of the queue is likely to wait."""
        return (position + 1) * self._interval


def _tokens(request: Request) -> int:
    """What the engine reads before the first token; a choice that forks from its leader reads nothing."""
    return 0 if request.leader else len(request.prompt) + len(request.source)
