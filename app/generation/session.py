"""Generation session: turns token events into completion events, with deadlines, usage and timings."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.common.errors import DeadlineExceeded, EngineError, WaitedTooLong
from app.common.event_loop import LazyTimer
from app.common.types import Request, RequestStarted, SampledEvent
from app.engine_client.token_stream import Arrival, Cancelled, TokenStream
from app.generation.output_choice import OutputChoice
from app.generation.request import Heartbeat, News, Queued, Started

_QUEUE_NEWS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of a request, in seconds from its submission."""

    deadline: float
    queue: float
    heartbeat: float
    """Silence after which a Heartbeat is emitted."""


@dataclass(slots=True)
class SessionTimes:
    """Timestamps of a request, in seconds of a monotonic clock."""

    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    away: float = 0.0
    """Seconds between the first and the last token for which the request was suspended."""


class GenerationSession:
    """Owns a token stream; the consumer of ready() and take() must always call close()."""

    def __init__(
        self, stream: TokenStream, choices: Sequence[OutputChoice], patience: Timeouts, clock: SessionTimes
    ) -> None:
        self.stream = stream
        self.choices = choices
        self.clock = clock
        self.cached_tokens = 0
        self.gaps: list[float] = []
        """Inter-token latencies in seconds since the metrics last collected them."""
        self._patience = patience
        self._deadline = clock.submitted + patience.deadline
        self._paused_at: float | None = None
        self._away = 0.0
        """Suspended seconds since the last token, not yet added to the clock's `away`."""
        self._started: set[int] = set()
        self._last_tokens: dict[int, float] = {}
        self._news: deque[News] = deque()
        self._failure: EngineError | None = None
        self._last_news = self._queued_at = time.monotonic()
        self._alarm = LazyTimer(stream.wake)
        if stream.queue_position:
            self._tell(Queued(stream.queue_position))

    @property
    def n_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(choice.n_tokens for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts and sources; a prompt with several choices counts once."""
        return sum(len(r.prompt) + len(r.source) for r in self._leaders())

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended and all events were taken."""
        return not self._news and self._failure is None and all(choice.ended for choice in self.choices)

    def close(self) -> None:
        """Releases the engine's resources of this request; idempotent."""
        self.stream.close()
        self._alarm.cancel()

    @property
    def duration(self) -> float:
        """Seconds from the submission until now, or until the client disconnected."""
        return (self._paused_at or time.monotonic()) - self.clock.submitted - self.clock.away - self._away

    def pause(self) -> None:
        """Suspends the request: releases its engine resources until go_on()."""
        self.stream.pause()
        self._paused_at = time.monotonic()

    def go_on(self) -> None:
        """The stream was submitted again: it is queued from now on, and the suspended time does not count."""
        now, clock = time.monotonic(), self.clock
        away = now - (self._paused_at or now)
        self._paused_at, self._queued_at = None, now
        self._last_tokens.clear()
        if clock.first_token is not None:
            self._away += away
            return
        clock.submitted += away
        clock.started = None if clock.started is None else clock.started + away

    def usage(self) -> dict[str, Any]:
        """Token counts of the engine, including EOS and tokens after a stop string."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.n_tokens,
            "total_tokens": self.prompt_tokens + self.n_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timings(self) -> dict[str, float]:
        """Milliseconds, and tokens per second of all choices from first to last token; 0 before two tokens."""
        clock = self.clock
        started = clock.started or clock.submitted
        first = clock.first_token or started
        decode = (clock.last_token or first) - first - clock.away
        later = self.n_tokens - sum(choice.n_tokens > 0 for choice in self.choices)
        return {
            "queue_ms": round((started - clock.submitted) * 1e3, 3),
            "prefill_ms": round(max(0.0, first - started) * 1e3, 3),
            "first_token_ms": round((first - clock.submitted) * 1e3, 3),
            "decode_ms": round(decode * 1e3, 3),
            "tokens_per_second": round(later / decode, 2) if decode > 0 else 0.0,
        }

    async def ready(self) -> bool:
        """Waits for an engine event or a timeout; False if that yields no completion event.

        Raises EngineError if the request cannot continue.
        """
        if not self._news:
            if self._failure:
                raise self._failure
            self._alarm.set(min(self._last_news + self._longest_silence, self._limit()))
            for arrival in await self.stream.receive():
                self._take(arrival)
            self._look_at_clock(time.monotonic())
        return bool(self._news)

    @property
    def has_news(self) -> bool:
        """Whether take() has an event to return."""
        return bool(self._news)

    def take(self) -> News:
        """The next completion event, in order; only call it if `has_news`."""
        return self._news.popleft()

    def _tell(self, *news: News) -> None:
        self._news.extend(news)
        if news:
            self._last_news = time.monotonic()

    @property
    def _longest_silence(self) -> float:
        return self._patience.heartbeat if self.stream.queue_position is None else _QUEUE_NEWS_SECONDS

    def _look_at_clock(self, now: float) -> None:
        if now >= self._limit() and not self._failure:
            self._give_up(now)
        # Measured from the last completion event: tokens without text must not postpone the heartbeat.
        elif not self._news and now - self._last_news >= self._longest_silence:
            waiting = self.stream.queue_position
            self._tell(Heartbeat() if waiting is None else Queued(waiting))

    def _limit(self) -> float:
        """The next deadline in the current state."""
        limit = self._deadline
        if self.stream.queue_position is None:
            return limit
        return min(limit, self._queued_at + self._patience.queue)

    def _give_up(self, now: float) -> None:
        if self.stream.queue_position is not None and now < self._deadline:
            self._fail(WaitedTooLong("the request waited too long for its turn: try again in a moment", 5))
        elif not self.n_tokens:
            self._fail(DeadlineExceeded("the deadline passed before the first token: raise deadline_ms, or try later"))
        else:
            self._end_all("timeout")
            self.stream.close()

    def _fail(self, error: EngineError) -> None:
        self._failure = error
        self.stream.close()

    def _end_all(self, finish_reason: str) -> None:
        for choice in self.choices:
            if not choice.ended:
                self._tell(*choice.end(finish_reason))
                assert choice.ended
                self._tell(choice.ended)

    def _take(self, arrival: Arrival) -> None:
        choice, item = self.choices[arrival.choice], arrival.item
        if isinstance(item, SampledEvent):  # first, since nearly all events are
            if not choice.ended:
                self._take_token(arrival, choice, item)
        elif isinstance(item, Cancelled):
            self._end_all("cancelled")
        elif isinstance(item, EngineError):
            self._fail(item)
        elif isinstance(item, RequestStarted):
            self._note_start(arrival, item)
        elif choice.echo:  # prompt scores, shared by all choices of the prompt; None once the choice has ended
            choice.echo.add(item)

    def _take_token(self, arrival: Arrival, choice: OutputChoice, event: SampledEvent) -> None:
        self._note_token(arrival, event)
        self._tell(*choice.take(event))
        if choice.ended:
            self._tell(choice.ended)
            if not event.finish:
                self.stream.leave(arrival.choice)

    def _note_start(self, arrival: Arrival, started: RequestStarted) -> None:
        # A resumed stream starts again; its cache hits then are its own earlier work.
        if arrival.choice in self._leader_places() and arrival.choice not in self._started:
            self.cached_tokens += started.cached_tokens
        self._started.add(arrival.choice)
        if self.stream.holds:  # a gap of the client, not of the engine
            self._last_tokens.pop(arrival.choice, None)
        if self.clock.started is None:
            self.clock.started = arrival.at
            self._tell(Started())

    def _note_token(self, arrival: Arrival, event: SampledEvent) -> None:
        self.clock.first_token = self.clock.first_token or arrival.at
        if event.token is None:
            return
        if (before := self._last_tokens.get(arrival.choice)) is not None:
            self.gaps.append(arrival.at - before)
        self._last_tokens[arrival.choice] = arrival.at
        self.clock.away, self._away = self.clock.away + self._away, 0.0
        self.clock.last_token = arrival.at

    def _leader_places(self) -> list[int]:
        return [place for place, request in enumerate(self.stream.requests) if request.leader is None]

    def _leaders(self) -> list[Request]:
        return [self.stream.requests[place] for place in self._leader_places()]
