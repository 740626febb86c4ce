"""Queue of the requests that wait for an engine, and their exact positions in it.

There is one queue for all engines. Tenants (requests of one cache namespace) take turns, a request each: what one costs
the engine is only known afterwards, and its position must be exact. Within a tenant the first to come is the first
served. Followers (n above 1) are passed over while the engine of their leader has no capacity, and requests with a
grammar while the engines compile as many as they may.

    tenants:  ann [a1 a2 a3]   bob [b1]   cyd [c1 c2]        order: a1 b1 c1 a2 c2 a3

A request leaves its tenant's part when it is sent to an engine, but counts as waiting until the engine has started it;
so do requests that are still being tokenized. With API keys no tenant can fill the queue alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec import Struct

from app.common.errors import InvalidRequest, QueueFull
from app.common.fair_turns import FairTurns, may_hold
from app.common.types import Request, RequestStarted
from app.engine_client.throughput_estimate import ThroughputEstimate

_TENANT_FACTOR = 7
"""A tenant may hold seven times what is free: seven eighths of the queue if it is alone."""
_TURN = 1.0
_MAX_RETRY_SECONDS = 120.0
_PROMPT_TOKENS_PER_STEP = 8
"""Prompt tokens that cost as much as one generated token: a step computes 256 of them or 32 with default settings."""


class _Entry(Struct, frozen=True):
    request: Request
    arrival: int
    tokens: int
    work: float


@dataclass(slots=True, eq=False)
class _SubQueue:
    """One tenant's part of the queue; owned by RequestQueue."""

    tokens: int = 0
    sent: int = 0
    """Requests that an engine has and has not started."""
    tokenizing: int = 0
    """Requests whose prompts are being tokenized."""
    entries: list[_Entry] = field(default_factory=list)
    """Requests to be sent, the oldest first."""

    @property
    def length(self) -> int:
        return len(self.entries) + self.sent + self.tokenizing


class RequestQueue:
    """Requests that were submitted and have not started, and those that are about to be submitted."""

    def __init__(self, *, max_requests: int, max_prompt_tokens: int) -> None:
        self.max_requests, self.max_prompt_tokens = max_requests, max_prompt_tokens
        """Most of each that may wait."""
        self._entries: dict[str, _Entry] = {}
        self._sent: dict[str, None] = {}
        """Those of the entries that an engine has, in the order of sending; the values are unused."""
        self._subqueues: dict[str, _SubQueue] = {}  # by cache namespace
        self._turns = FairTurns[_SubQueue]()
        """Those with requests to be sent."""
        self._arrivals = self._returns = 0
        self._tokenizing = 0
        """Requests whose prompts are being tokenized."""
        self.prompt_tokens = 0
        """Prompt tokens that wait, including estimates for texts that are being tokenized."""
        self._work = 0.0
        self._throughput = ThroughputEstimate()

    @property
    def n_unsent(self) -> int:
        """Requests that no engine has."""
        return len(self._entries) - len(self._sent)

    def retry_after(self, now: float) -> int:
        """Whole seconds until the requests that wait now have started; the Retry-After of a refused request."""
        return math.ceil(min(_MAX_RETRY_SECONDS, max(1.0, self.eta_seconds(len(self._entries), now))))

    @contextmanager
    def reserved(
        self, cache_namespace: str, requests: int, tokens: int, now: float, max_wait: float = math.inf
    ) -> Iterator[None]:
        """Reserves capacity for requests that are being tokenized, about `tokens` long in total.

        Raises QueueFull, also if they would wait longer than `max_wait`; InvalidRequest if they never fit.
        """
        self._check(cache_namespace, requests, tokens, now)
        wait = self.eta_seconds(self._position(cache_namespace, len(self._subqueue(cache_namespace).entries)), now)
        if wait > max_wait and self._entries and self._throughput.is_reliable(self._mean_work, max_wait, now):
            raise QueueFull(
                f"the request would wait {wait:.0f} s for its turn, and its time allows {max_wait:.0f}: try again in "
                f"{self.retry_after(now)} s",
                self.retry_after(now),
            )
        subqueue = self._subqueues.setdefault(cache_namespace, _SubQueue())
        self._count_tokenizing(subqueue, requests, tokens)
        try:
            yield
        finally:
            self._count_tokenizing(subqueue, -requests, -tokens)
            self._remove_if_empty(cache_namespace, subqueue)

    def check(self, requests: Sequence[Request], now: float) -> None:
        """Raises QueueFull if these requests exceed a limit now, InvalidRequest if they always would."""
        if requests:
            self._check(requests[0].cache_namespace, len(requests), sum(map(prompt_tokens, requests)), now)

    def add(self, request: Request, *, first: bool = False) -> None:
        """Adds a request behind all others of its tenant, or before them with `first`."""
        self._arrivals, self._returns = self._arrivals + (not first), self._returns + first
        tokens = prompt_tokens(request)
        arrival = -self._returns if first else self._arrivals
        entry = _Entry(request, arrival, tokens, tokens / _PROMPT_TOKENS_PER_STEP + request.max_tokens)
        subqueue = self._subqueues.setdefault(request.cache_namespace, _SubQueue())
        subqueue.entries.insert(0 if first else len(subqueue.entries), entry)
        if len(subqueue.entries) == 1:
            self._turns.wait(subqueue, _TURN)
        subqueue.tokens += tokens
        self.prompt_tokens += tokens
        self._work += entry.work
        self._entries[request.id] = entry

    def take(self, choose: Callable[[str], int | None]) -> tuple[str, int] | None:
        """Takes the next request that can be sent, which is its tenant's turn.

        choose: the engine for a request, by its id, or None; called for each tenant's first request, and for others
        if that may be passed over.
        """
        for subqueue in self._turns:
            can_compile = True
            for index, entry in enumerate(subqueue.entries):
                request = entry.request
                if request.grammar and not can_compile:
                    continue
                engine = choose(request.id)
                if engine is not None:
                    del subqueue.entries[index]
                    subqueue.sent += 1
                    self._sent[request.id] = None
                    self._turns.take(subqueue, _TURN if subqueue.entries else None)
                    return request.id, engine
                can_compile &= not request.grammar
                if not (request.leader or request.grammar):
                    break
        return None

    def on_report(self, started: Sequence[RequestStarted], now: float, *, has_backlog: bool) -> None:
        """Handles an engine's report: removes started requests, and records whether others still wait.

        has_backlog: whether an engine has requests that it cannot start yet.
        """
        work = 0.0
        for event in started:
            if entry := self._entries.get(event.request_id):
                work += entry.work
                self.remove(event.request_id)
        self._throughput.record(work, now, has_backlog=has_backlog or self.n_unsent > 0)

    def remove(self, request_id: str) -> None:
        """Removes a request; one that does not wait is ignored."""
        if entry := self._entries.pop(request_id, None):
            subqueue = self._subqueues[entry.request.cache_namespace]
            if request_id in self._sent:
                del self._sent[request_id]
                subqueue.sent -= 1
            else:
                del subqueue.entries[_index(subqueue, entry)]
                if not subqueue.entries:
                    self._turns.leave(subqueue)
            subqueue.tokens -= entry.tokens
            self.prompt_tokens -= entry.tokens
            self._work = self._work - entry.work if self._entries else 0.0
            self._remove_if_empty(entry.request.cache_namespace, subqueue)

    def position(self, request_id: str) -> int | None:
        """Requests that will start before this one; None if it does not wait."""
        if (entry := self._entries.get(request_id)) is None:
            return None
        if request_id in self._sent:
            return list(self._sent).index(request_id)
        return self._position(
            entry.request.cache_namespace, _index(self._subqueues[entry.request.cache_namespace], entry)
        )

    def eta_seconds(self, position: int, now: float) -> float:
        """Estimated wait of a request at this queue position."""
        return self._throughput.seconds_for((position + 1) * self._mean_work, self._mean_work, now)

    @property
    def _mean_work(self) -> float:
        """Average work of a request in this queue."""
        return max(1.0, self._work / len(self._entries)) if self._entries else 1.0

    def _position(self, cache_namespace: str, before: int) -> int:
        """Position of a request with `before` requests of its own tenant ahead: other tenants start one for each."""
        position, others_first, own = len(self._sent) + before, 1, self._subqueues.get(cache_namespace)
        for other in self._turns:
            if other is own:
                others_first = 0
            else:
                position += min(len(other.entries), before + others_first)
        return position

    def _check(self, cache_namespace: str, requests: int, tokens: int, now: float) -> None:
        """Raises QueueFull if the added requests exceed a limit; InvalidRequest if they are too many to ever fit.

        With API keys, tenants share the queue by a dynamic threshold: one without waiting requests may always queue.
        """
        if requests > self.max_requests:
            raise InvalidRequest(
                f"the request asks for {requests} continuations, this server takes at most {self.max_requests} "
                "at once: send fewer prompts, or a smaller n",
                "prompt",
            )
        waiting, waiting_tokens = len(self._entries) + self._tokenizing, self.prompt_tokens
        free, free_tokens = self.max_requests - waiting, self.max_prompt_tokens - waiting_tokens
        own, problem = self._subqueue(cache_namespace), ""
        if requests > free:
            problem = f"{waiting} requests wait already"
        elif waiting and tokens > free_tokens:
            problem = f"the queue is full ({waiting_tokens} prompt tokens wait)"
        elif cache_namespace and not (
            may_hold(own.length, requests, free, factor=_TENANT_FACTOR)
            and may_hold(own.tokens, tokens, free_tokens, factor=_TENANT_FACTOR)
        ):
            problem = (
                f"{own.length} requests of this key ({own.tokens} prompt tokens) wait already, the rest of the queue "
                "is for other keys"
            )
        if problem:
            retry_after = self.retry_after(now)
            raise QueueFull(f"{problem}: try again in {retry_after} s", retry_after)

    def _count_tokenizing(self, subqueue: _SubQueue, requests: int, tokens: int) -> None:
        subqueue.tokenizing += requests
        self._tokenizing += requests
        subqueue.tokens += tokens
        self.prompt_tokens += tokens

    def _subqueue(self, cache_namespace: str) -> _SubQueue:
        return self._subqueues.get(cache_namespace) or _SubQueue()

    def _remove_if_empty(self, cache_namespace: str, subqueue: _SubQueue) -> None:
        if not subqueue.length and self._subqueues.get(cache_namespace) is subqueue:
            del self._subqueues[cache_namespace]


def _index(subqueue: _SubQueue, entry: _Entry) -> int:
    return bisect_left(subqueue.entries, entry.arrival, key=lambda one: one.arrival)


def prompt_tokens(request: Request) -> int:
    """What the engine reads before the first token.

    A choice that forks from its leader reads no prompt, unless it continues from generated tokens of its own.
    """
    is_fork = request.leader is not None and not request.generated
    return len(request.generated) + (0 if is_fork else len(request.prompt) + len(request.source))
