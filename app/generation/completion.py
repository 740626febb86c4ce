"""Completion: one response from its submission to its end, as a state machine that turns engine events into text.

            first start             every choice has ended, cancel(), a timeout, an error, end()
   QUEUED --------------> RUNNING ------------------------------------------------------------> ENDED
     ^   \\                 |   ^                                                                  ^
     |    \\ detach()       | detach(): the client left      suspend(): the reader is slow         |
     |     v               v   | resume(): the reader has caught up                               |
     +------------------ SUSPENDED ---------------------------------------------------------------+
       attach(): the client is back

The engine's side adds tokens and calls flush() once per read; the reader, a Consumer, then takes `events`. Timers call
the same flush(), so every event takes one path. A suspended completion holds no resources of an engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from app.common.errors import DeadlineExceeded, QueueTimeout
from app.common.lazy_timer import LazyTimer
from app.common.types import PromptScores, Request, RequestStarted, SampledEvent
from app.engine_client.engine_pool import EnginePool
from app.engine_client.open_sequences import OpenSequences, Writes, flush_all
from app.generation.detokenizer import OutputChoice
from app.generation.request import CompletionEvent, Heartbeat, Queued, Started

MAX_BUFFERED = 4096
"""Tokens and top log-probabilities that may wait for a slow reader: about 1.2 MB of plain tokens (300 bytes each), or
0.6 MB of tokens with 20 log-probabilities (3 KB). These are many pages of text, so that completions are rarely
suspended: submitting one again costs the engine a prompt, which is mostly in its cache."""
_QUEUE_EVENT_SECONDS = 1.0

Consumer = Callable[[Writes], bool]
"""Takes events, and adds what is to be written; must not raise. Returns whether the reader keeps up."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits of a request, in seconds from its submission."""

    deadline: float
    queue: float
    heartbeat: float
    """Silence after which a Heartbeat is emitted."""


@dataclass(slots=True)
class CompletionTimes:
    """Timestamps of a request, in seconds of a monotonic clock."""

    submitted: float = field(default_factory=time.monotonic)
    begun: float = field(init=False)
    """Like `submitted`, which detached time postpones."""
    tokenizing: float | None = None
    compiling: float | None = None
    """When its grammar began to be compiled; None for a request without one."""
    queued: float | None = None
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    detached_seconds: float = 0.0
    """Seconds between the first and the last token for which the client was away."""

    def __post_init__(self) -> None:
        self.begun = self.submitted


class State(Enum):
    """See the module's docstring."""

    QUEUED = "queued"
    RUNNING = "running"
    SUSPENDED = "suspended"
    ENDED = "ended"


class Completion(OpenSequences):
    """Owned by the event loop; its owner must always call end()."""

    __slots__ = (
        *("state", "choices", "times", "prompt_tokens", "cached_tokens", "inter_token_latencies", "events", "failure"),
        *("last_event_at", "n_suspensions", "_pool", "_timeouts", "_deadline", "_detached_at", "_detached_seconds"),
        *("_started", "_queued_at", "_timer", "_consumer", "_n_open", "_n_buffered"),
    )

    def __init__(
        self,
        pool: EnginePool,
        requests: Sequence[Request],
        choices: Sequence[OutputChoice],
        timeouts: Timeouts,
        times: CompletionTimes,
    ) -> None:
        super().__init__(requests)
        self._pool = pool
        self.state = State.QUEUED
        self.choices = choices
        self._n_open = len(choices)
        self.times = times
        leaders = [request for request in requests if request.leader is None]
        self.prompt_tokens = sum(len(leader.prompt) + len(leader.source) for leader in leaders)
        """Tokens of prompts and sources; a prompt with several choices counts once."""
        self.cached_tokens = 0
        self.inter_token_latencies: list[float] = []
        """Inter-token latencies in seconds since the metrics last collected them."""
        self.n_suspensions = 0
        """Times that it was suspended because its reader did not keep up."""
        self._timeouts = timeouts
        self._deadline = times.submitted + timeouts.deadline
        self._detached_at: float | None = None
        self._detached_seconds = 0.0
        """Detached seconds since the last token, not yet added to `times.detached_seconds`."""
        self._started: set[int] = set()
        self.events: deque[CompletionEvent] = deque()
        """Events that the consumer has not taken yet, in order."""
        self._n_buffered = 0
        """Tokens and top log-probabilities behind `events`."""
        self._consumer: Consumer | None = None
        self.failure: Exception | None = None
        """Why it ended without its last events; raised or sent after `events`."""
        self.last_event_at = self._queued_at = time.monotonic()
        """When the latest event was made, in monotonic seconds."""
        self._timer = LazyTimer(self._on_timer)

    def submit(self) -> None:
        """Queues it. Raises NotReady, QueueFull, InvalidRequest."""
        # Tokens that the client of a resumed response has may be the last ones of some choices, or of all.
        self._open = {name: index for name, index in self._open.items() if not self.choices[index].ended}
        if self._open:
            self._pool.submit(self)
        if position := self.queue_position:
            self._emit(Queued(position))
        for choice in self.choices:
            self.events.extend(choice.first)
            if choice.ended:
                self._emit_end(choice)
        self._set_timer()

    @property
    def queue_position(self) -> int | None:
        """How many requests wait ahead of its first; None once it runs or has ended."""
        if self.state is not State.QUEUED or not self._open:
            return None
        return self._pool.queue.position(next(iter(self._open)))

    @property
    def n_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(choice.n_tokens for choice in self.choices)

    @property
    def n_sampled(self) -> int:
        """n_tokens without those that the client of a resumed response had."""
        return self.n_tokens - sum(len(request.generated) for request in self.requests)

    @property
    def n_started(self) -> int:
        """Choices for which a token was sampled."""
        counts = zip(self.choices, self.requests, strict=True)
        return sum(choice.n_tokens > len(request.generated) for choice, request in counts)

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended and all events were taken."""
        return not self.events and self.failure is None and not self._n_open

    @property
    def duration(self) -> float:
        """Seconds from the submission until now, or until the client disconnected."""
        end = self._detached_at or time.monotonic()
        return end - self.times.submitted - self.times.detached_seconds - self._detached_seconds

    def read(self, consumer: Consumer | None) -> None:
        """Hands what has arrived, and will arrive, to `consumer`, which replaces an earlier one."""
        self._consumer = consumer
        if self.events or self.failure:
            flush_all([self])

    def flush(self, writes: Writes) -> None:
        """Lets the consumer take the events, and suspends the completion while the consumer does not keep up."""
        keeps_up = self._consumer is not None and self._consumer(writes)
        if not self.events:
            self._n_buffered = 0
            if self.state is State.SUSPENDED:
                self.resume()
        elif self._n_buffered > MAX_BUFFERED and not keeps_up:
            self._suspend()

    def resume(self) -> None:
        """The reader has taken all events: submits the completion again if it was suspended for its slow reader."""
        self._n_buffered = 0
        if self.state is State.SUSPENDED and self._detached_at is None and self._open:
            self.state = State.RUNNING  # it was admitted before: no queue timeout, no second Started
            self._pool.resume(self)

    def detach(self) -> None:
        """The client left: releases the engine until attach(). The deadline goes on, the timings do not."""
        self._consumer = None
        self._detached_at = time.monotonic()
        self.incidents.append((self._detached_at, "client disconnected"))
        self._timer.cancel()
        if self._open:
            self._pool.cancel(self.open_ids)
            self.state = State.SUSPENDED

    def attach(self) -> None:
        """The client is back: queues the completion again. Raises NotReady, QueueFull."""
        self._pool.resubmit(self)
        now, times = time.monotonic(), self.times
        self.incidents.append((now, "client resumed the stream"))
        away = now - (self._detached_at or now)
        self._detached_at, self._queued_at = None, now
        self.state = State.QUEUED
        for choice in self.choices:
            choice.last_token_at = None
        if times.first_token is not None:
            self._detached_seconds += away
        else:
            times.submitted += away
            times.started = None if times.started is None else times.started + away
        self._set_timer()

    def cancel(self) -> bool:
        """Stops it, with the reason "cancelled" for its reader; False if the engine had finished it."""
        if not self._open:
            return False
        self._release()
        self._end_choices("cancelled")
        flush_all([self])
        return True

    def fail(self, error: Exception) -> None:
        """Ends it with an error for its reader, unless it has ended."""
        if self.state is not State.ENDED:
            self._fail(error)
            flush_all([self])

    def end(self) -> None:
        """It is over: releases all that it holds; idempotent."""
        self._consumer = None
        self._timer.cancel()
        self._release()

    def add_token(self, request_id: str, at: float, event: SampledEvent) -> None:
        """Adds a token, or the end of a sequence without one. Events of an ended sequence are dropped."""
        index = self._open.get(request_id)
        if index is None:
            return
        token = event.token
        if token is not None:
            self._generated[index].append(token)
        if event.finish:
            del self._open[request_id]
        choice = self.choices[index]
        if choice.ended:
            return
        times = self.times
        times.first_token = times.first_token or at
        if token is not None:
            if choice.last_token_at is not None:
                self.inter_token_latencies.append(at - choice.last_token_at)
            choice.last_token_at = times.last_token = at
            if self._detached_seconds:
                times.detached_seconds, self._detached_seconds = times.detached_seconds + self._detached_seconds, 0.0
        self._n_buffered += 1 + len(event.top)
        try:
            deltas = choice.add(event)
        except Exception as error:  # concerns this request, not the engine whose report is being delivered
            self._fail(error)
            return
        if deltas:
            self.events.extend(deltas)
            self.last_event_at = at
        if choice.ended:
            self._emit_end(choice)
            if not event.finish:
                del self._open[request_id]
                self._pool.cancel([request_id])

    def add_start(self, at: float, started: RequestStarted) -> None:
        """The engine has started a sequence."""
        index = self._open.get(started.request_id)
        if index is None:
            return
        # A completion that was submitted again starts again; its cache hits are then its own earlier work.
        if self.requests[index].leader is None and index not in self._started:
            self.cached_tokens += started.cached_tokens
        self._started.add(index)
        self.state = State.RUNNING
        if self.n_suspensions:  # the client caused the gap, not the engine
            self.choices[index].last_token_at = None
        if self.times.started is None:
            self.times.started = at
            self._emit(Started())

    def add_scores(self, scores: PromptScores) -> None:
        """Adds log-probabilities of a sequence's prompt."""
        index = self._open.get(scores.request_id)
        if index is None:
            return
        self._scored[index] = scores.start - 1 + len(scores.tokens)
        if echo := self.choices[index].echo:  # shared by all choices of the prompt; None once ended
            echo.add(scores)

    def _suspend(self) -> None:
        """The reader is slow: releases the engine until the reader has taken what is buffered."""
        if self._open and self.state is not State.SUSPENDED:
            self.state = State.SUSPENDED
            self.n_suspensions += 1
            self.incidents.append((time.monotonic(), "suspended: the client does not read"))
            self._pool.suspend(self)

    def _release(self) -> None:
        """Cancels the open sequences."""
        self.state = State.ENDED
        names = list(self._open)
        self._open.clear()
        if names:
            self._pool.cancel(names)

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self._release()

    def _emit(self, event: CompletionEvent) -> None:
        self.events.append(event)
        self.last_event_at = time.monotonic()

    def _emit_end(self, choice: OutputChoice) -> None:
        assert choice.ended
        self._n_open -= 1
        self._emit(choice.ended)
        if not self._n_open:
            self.state = State.ENDED

    def _end_choices(self, finish_reason: str) -> None:
        try:
            for choice in self.choices:
                if not choice.ended:
                    self.events.extend(choice.finish(finish_reason))
                    self._emit_end(choice)
        except Exception as error:  # its reader must get an end in any case
            self._fail(error)

    @property
    def _longest_silence(self) -> float:
        return self._timeouts.heartbeat if self.queue_position is None else _QUEUE_EVENT_SECONDS

    def _limit(self) -> float:
        """The next deadline in the current state."""
        if self.queue_position is None:
            return self._deadline
        return min(self._deadline, self._queued_at + self._timeouts.queue)

    def _set_timer(self) -> None:
        if self.state is State.ENDED:
            return
        # While a slow reader has events, there is nothing to add before the deadline.
        silent_since = time.monotonic() if self.events else self.last_event_at
        self._timer.set(min(silent_since + self._longest_silence, self._limit()))

    def _on_timer(self) -> None:
        """Emits what is due; the timer may also fire too early."""
        now = time.monotonic()
        if self.state is State.ENDED:
            return
        if now >= self._limit():
            self._on_timeout(now)
        # Measured from the last completion event: tokens without text must not postpone the heartbeat.
        elif not self.events and now - self.last_event_at >= self._longest_silence:
            waiting = self.queue_position
            self._emit(Heartbeat() if waiting is None else Queued(waiting))
        self._set_timer()
        flush_all([self])

    def _on_timeout(self, now: float) -> None:
        if self.queue_position is not None and now < self._deadline:
            self._fail(QueueTimeout("the request waited too long for its turn: try again in a moment", 5))
        elif not self.n_tokens:
            self._fail(DeadlineExceeded("the deadline passed before the first token: raise deadline_ms, or try later"))
        else:
            self._release()
            self._end_choices("timeout")
