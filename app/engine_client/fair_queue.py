"""Fair queue in front of the engines, and its measured throughput.

There is one queue for all engines (engine_pool.py): positions are computed as if the engines took from it together.
Requests that are still being tokenized count as waiting. Tenants (requests of one cache namespace) take turns, as in
the engine's own queue, and with API keys no tenant can fill the queue alone.

check_ids() and check_queue() decide whether a request fits the model and the queue, before it is submitted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from app.common.errors import ContextLengthExceeded, InvalidRequest, QueueFull
from app.common.types import Request, RequestStarted

_SHARE = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on what may wait."""

    max_requests: int
    max_prompt_tokens: int


class QueueDemand(NamedTuple):
    """Requests of one answer, and the tokens of their prompts."""

    requests: int
    tokens: int


class QueueState(NamedTuple):
    """What waits, in total or of one tenant."""

    requests: int
    tokens: int


def check_ids(ids: list[int], *, context: int, vocab_size: int, field: str) -> None:
    """Raises ContextLengthExceeded for more ids than the context holds, InvalidRequest for an unknown one."""
    if len(ids) > context:
        raise ContextLengthExceeded(len(ids), context, field)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside the vocabulary: ids go from 0 to {vocab_size - 1}", field
            )


def check_queue(
    limits: QueueLimits,
    *,
    line: QueueState,
    own: QueueState | None,
    adding: QueueDemand,
    retry_after: Callable[[], int],
) -> None:
    """Raises QueueFull if the added requests exceed a limit; `own` is what their tenant has in the queue already.

    With API keys (`own`), one tenant may take seven times what is left: seven eighths of the queue if it is alone, and
    less the more tenants there are, so that there is always capacity for the next one.
    Raises InvalidRequest if there are so many requests that they never fit.
    """
    if adding.requests > limits.max_requests:
        raise InvalidRequest(
            f"the request asks for {adding.requests} continuations, this server takes at most {limits.max_requests} "
            "at once: send fewer prompts, or a smaller n",
            "prompt",
        )
    free, free_tokens = limits.max_requests - line.requests, limits.max_prompt_tokens - line.tokens
    if adding.requests > free:
        raise _full(f"{line.requests} requests wait already", retry_after())
    if line.requests and adding.tokens > free_tokens:
        raise _full(f"the queue is full ({line.tokens} prompt tokens wait)", retry_after())
    # A tenant without waiting requests may always queue.
    if own is None or not own.requests:
        return
    if own.requests + adding.requests > _SHARE * free or own.tokens + adding.tokens > _SHARE * free_tokens:
        raise _full(
            f"{own.requests} requests of yours ({own.tokens} prompt tokens) wait already, the rest of the queue is "
            "for others",
            retry_after(),
        )


def _full(why: str, retry_after: int) -> QueueFull:
    return QueueFull(f"{why}: try again in {retry_after} s", retry_after)


# An empty queue says nothing about throughput, since requests are admitted at once. So the estimate counts only the
# time after reports with a backlog, and the work that left the queue in that time; both decay over half a minute.

_FADING = 30.0
_FIRST, _FIRST_INTERVAL = 2, 0.1
"""Prior of the estimate: requests, and seconds between two of them, before anything is measured."""
_ENOUGH = 8


class ThroughputEstimate:
    """Work per second, whatever unit work is in."""

    def __init__(self) -> None:
        self._work = self._seconds = 0.0
        self._backlog_since: float | None = None

    @property
    def has_backlog(self) -> bool:
        """Whether requests waited at the last report: new ones do not start at once."""
        return self._backlog_since is not None

    def note(self, left: float, now: float, *, has_backlog: bool) -> None:
        """Records the work that left the queue since the last call, and whether requests still wait."""
        if self._backlog_since is not None:
            seconds = max(0.0, now - self._backlog_since)
            fading = math.exp(-seconds / _FADING)
            self._work = self._work * fading + left
            self._seconds = self._seconds * fading + seconds
        self._backlog_since = now if has_backlog else None

    def seconds_for(self, work: float, one: float, now: float) -> float:
        """How long `work` takes to leave the queue, where a request is about `one`.

        A prior assumes that a few requests left quickly, with a weight that decays: so there is an estimate before the
        first measurement, and the estimate for a stalled engine grows with each second but stays finite.
        """
        first = _FIRST * max(0.05, 1 - self._seconds / _FADING)
        return work * (self._measured(now) + first * _FIRST_INTERVAL) / (self._work + first * one)

    def is_sure(self, one: float, seconds: float, now: float) -> bool:
        """Whether the estimate justifies a refusal: enough requests have left, or none has for so many seconds."""
        return self.has_backlog and (self._work >= _ENOUGH * one or self._measured(now) >= seconds)

    def _measured(self, now: float) -> float:
        standing = 0.0 if self._backlog_since is None else max(0.0, now - self._backlog_since)
        return self._seconds + standing


_MAX_RETRY_SECONDS = 120.0
_PROMPT_TOKENS_PER_STEP = 8
"""A step reads so many times as many prompt tokens as it writes: 256 for 32 with default settings."""


@dataclass(slots=True)
class _Lane:
    """One tenant's part of the queue; owned by FairQueue."""

    tokens: int = 0
    being_read: int = 0
    """Requests whose prompts are being tokenized."""
    arrivals: list[int] = field(default_factory=list)
    """Of those that wait in the engine, the oldest first."""

    @property
    def length(self) -> int:
        return len(self.arrivals) + self.being_read


@dataclass(frozen=True, slots=True)
class _Place:
    salt: str
    arrival: int
    tokens: int
    work: float


class FairQueue:
    """Requests that were submitted and have not started, and those that are about to be submitted."""

    def __init__(self, limits: QueueLimits) -> None:
        self.limits = limits
        self._places: dict[str, _Place] = {}
        self._lanes: dict[str, _Lane] = {}  # by cache namespace, in the order of their turns
        self._arrivals = 0
        self._work = 0.0
        self._pace = ThroughputEstimate()
        self._behind: set[int] = set()
        """Engines with waiting requests."""

    def retry_after(self, now: float) -> int:
        """Whole seconds until the requests that wait now have started; the Retry-After of a refused request."""
        return math.ceil(min(_MAX_RETRY_SECONDS, max(1.0, self.eta_seconds(len(self._places), now))))

    @contextmanager
    def reserved(self, salt: str, requests: int, tokens: int, now: float, patience: float = math.inf) -> Iterator[None]:
        """Reserves capacity for requests that are being tokenized, about `tokens` long in total.

        Raises QueueFull, also where they would wait longer than `patience`; InvalidRequest where they never fit.
        """
        self._check(salt, QueueDemand(requests, tokens), now)
        wait = self.eta_seconds(self._position(salt, len(self._lane(salt).arrivals)), now)
        if wait > patience and self._places and self._pace.is_sure(self._one, patience, now):
            raise QueueFull(
                f"the request would wait {wait:.0f} s for its turn, and its time allows {patience:.0f}: try again in "
                f"{self.retry_after(now)} s",
                self.retry_after(now),
            )
        lane = self._lanes.setdefault(salt, _Lane())
        lane.being_read += requests
        lane.tokens += tokens
        try:
            yield
        finally:
            lane.being_read -= requests
            lane.tokens -= tokens
            self._forget_if_empty(salt, lane)

    def check(self, requests: Sequence[Request], now: float) -> None:
        """Raises QueueFull where these would break a bound now, InvalidRequest where they always would."""
        if requests:
            self._check(requests[0].salt, QueueDemand(len(requests), sum(map(_tokens, requests))), now)

    def join(self, request: Request) -> None:
        """Appends a request to its tenant's lane; a request that waits already keeps its position."""
        if request.id in self._places:
            return
        self._arrivals += 1
        lane = self._lanes.setdefault(request.salt, _Lane())
        lane.arrivals.append(self._arrivals)
        lane.tokens += (tokens := _tokens(request))
        work = tokens / _PROMPT_TOKENS_PER_STEP + request.max_tokens
        self._work += work
        self._places[request.id] = _Place(request.salt, self._arrivals, tokens, work)

    def begin(self, started: Sequence[RequestStarted], now: float, *, has_backlog: bool, engine: int = 0) -> None:
        """Handles an engine's report: removes started requests, and records whether others still wait for it."""
        work = 0.0
        for one in started:
            if place := self._places.get(one.request_id):
                work += place.work
                self.leave(one.request_id)
                if lane := self._lanes.pop(place.salt, None):
                    self._lanes[place.salt] = lane
        (self._behind.add if has_backlog else self._behind.discard)(engine)
        self._pace.note(work, now, has_backlog=bool(self._behind))

    def stand_down(self, engine: int) -> None:
        """Forgets the backlog of an engine whose requests have moved to others."""
        self._behind.discard(engine)

    def leave(self, request_id: str) -> None:
        """Removes a request; one that does not wait is ignored."""
        if place := self._places.pop(request_id, None):
            lane = self._lanes[place.salt]
            del lane.arrivals[bisect_left(lane.arrivals, place.arrival)]
            lane.tokens -= place.tokens
            self._work = self._work - place.work if self._places else 0.0
            self._forget_if_empty(place.salt, lane)

    def rename(self, request_id: str, name: str) -> None:
        """Changes the id of a waiting request, which keeps its position; one that does not wait is ignored."""
        if place := self._places.pop(request_id, None):
            self._places[name] = place

    def position(self, request_id: str) -> int | None:
        """Requests that will start before this one; None if it does not wait."""
        if (place := self._places.get(request_id)) is None:
            return None
        return self._position(place.salt, bisect_left(self._lanes[place.salt].arrivals, place.arrival))

    def eta_seconds(self, position: int, now: float) -> float:
        """Estimated wait of a request at this queue position."""
        return self._pace.seconds_for((position + 1) * self._one, self._one, now)

    @property
    def _one(self) -> float:
        """Average work of a request in this queue."""
        return max(1.0, self._work / len(self._places)) if self._places else 1.0

    def _position(self, salt: str, before: int) -> int:
        """Position of a request with `before` requests of its own tenant ahead: others take a turn for each."""
        position, others_first = before, 1
        for other, lane in self._lanes.items():
            if other == salt:
                others_first = 0
            else:
                position += min(len(lane.arrivals), before + others_first)
        return position

    def _check(self, salt: str, adding: QueueDemand, now: float) -> None:
        lanes, own = self._lanes.values(), self._lane(salt)
        line = QueueState(sum(lane.length for lane in lanes), sum(lane.tokens for lane in lanes))
        share = QueueState(own.length, own.tokens) if salt else None
        check_queue(self.limits, line=line, own=share, adding=adding, retry_after=lambda: self.retry_after(now))

    def _lane(self, salt: str) -> _Lane:
        return self._lanes.get(salt) or _Lane()

    def _forget_if_empty(self, salt: str, lane: _Lane) -> None:
        if not lane.length and self._lanes.get(salt) is lane:
            del self._lanes[salt]


def _tokens(request: Request) -> int:
    """What the engine reads before the first token; a choice that forks from its leader reads nothing."""
    return 0 if request.leader else len(request.prompt) + len(request.source)
