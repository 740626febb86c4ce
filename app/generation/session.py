"""Generation session: engine requests out, token events in, completion events with deadlines, usage and timings out.

BuiltRequests makes the engine's requests, one per continuation, and their output choices of a generation request.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from app.common.errors import DeadlineExceeded, EngineError, InvalidRequest, WaitedTooLong
from app.common.event_loop import LazyTimer
from app.common.ipc import Ready
from app.common.types import Request, RequestStarted, SampledEvent, SamplingParams
from app.engine_client.token_stream import Arrival, Cancelled, TokenStream
from app.generation.output_choice import OutputChoice, PromptEcho, TextRules
from app.generation.prompt_encoder import EncodedPrompt
from app.generation.request import GenerationRequest, Heartbeat, News, Queued, Started
from model.tokenizer.tokenizer import Tokenizer

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


_MOST_LOGPROBS = 200_000
NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class BuiltRequests:
    """All sequences of one generation request: choice i of prompt p has the index p * n + i."""

    def __init__(self, name: str, wish: GenerationRequest, ready: Ready, tokenizer: Tokenizer, salt: str) -> None:
        self._name = name
        self._wish = wish
        self._ready = ready
        self._tokenizer = tokenizer
        self._salt = salt
        self._eos_ids = () if wish.ignore_eos else tokenizer.end_ids(ready.eos_ids)

    def _check_size(self, reads: Sequence[EncodedPrompt]) -> None:
        """Raises InvalidRequest if the response would hold too many log-probabilities."""
        wish, context = self._wish, self._ready.context
        if wish.logprobs is None:
            return
        each = 1 + wish.logprobs
        drawn = 0 if wish.is_streamed else wish.max_tokens
        lengths = [(len(read.ids) if wish.echo else 0) + min(drawn, context - len(read.ids)) for read in reads]
        size = sum(lengths) * wish.n_drawn * each
        limit = max(_MOST_LOGPROBS, context * each)
        if size > limit:
            raise InvalidRequest(
                f"logprobs: the answer could hold {size} log-probabilities, at most {limit} are told at once: "
                "ask for fewer prompts, a smaller n, fewer tokens, or smaller logprobs",
                "logprobs",
            )

    def requests(self, reads: Sequence[EncodedPrompt], source: tuple[int, ...], guide: str = "") -> list[Request]:
        """The engine requests. Raises InvalidRequest."""
        wish = self._wish
        self._check_vocabulary()
        self._check_size(reads)
        if wish.min_tokens > wish.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({wish.min_tokens}) must not be above max_tokens ({wish.max_tokens})", "min_tokens"
            )
        params = self._params()
        requests = []
        for prompt, read in enumerate(reads):
            leader = Request(
                id=self._id(prompt * wish.n_drawn, len(reads)),
                prompt=read.ids,
                max_tokens=min(wish.max_tokens, self._ready.context - len(read.ids)),
                params=params,
                source=source,
                stop_ids=tuple(dict.fromkeys((*self._eos_ids, *wish.stop_token_ids))),
                prompt_logprobs=wish.logprobs if wish.echo else None,
                guide=guide,
                salt=self._salt,
            )
            requests.append(leader)
            for choice in range(1, wish.n_drawn):
                requests.append(
                    replace(
                        leader,
                        id=self._id(prompt * wish.n_drawn + choice, len(reads)),
                        params=replace(params, choice=choice),
                        prompt_logprobs=None,
                        leader=leader.id,
                    )
                )
        return requests

    def choices(self, requests: Sequence[Request], reads: Sequence[EncodedPrompt]) -> list[OutputChoice]:
        """The output choices that consume the events of `requests`."""
        wish = self._wish
        rules = TextRules(wish.stops, wish.include_stop, wish.min_tokens, frozenset(self._eos_ids))
        echoes = [self._echo(read) if wish.echo else None for read in reads]
        return [
            OutputChoice(place, request, self._tokenizer, rules, echoes[place // wish.n_drawn])
            for place, request in enumerate(requests)
        ]

    def _echo(self, read: EncodedPrompt) -> PromptEcho:
        return PromptEcho(read.text, read.ids, self._tokenizer, is_scored=self._wish.logprobs is not None)

    def _params(self) -> SamplingParams:
        """The request's values, or the model's defaults, or no filter; a random seed if none was given."""
        wish = self._wish
        asked = {name: value for name, value in wish.sampling.items() if value is not None}
        defaults = self._ready.sampling_defaults if wish.use_model_defaults else {}
        chosen: dict[str, Any] = {**NEUTRAL, **defaults, **asked}
        # best_of ranks by the log-probabilities of the sampled tokens.
        logprobs = 0 if wish.logprobs is None and wish.ranks else wish.logprobs
        return SamplingParams(
            **{**chosen, "top_k": max(0, int(chosen["top_k"]))},
            logit_bias=wish.logit_bias,
            min_tokens=wish.min_tokens,
            seed=secrets.randbits(53) if wish.seed is None else wish.seed,  # 53 bits survive every JSON parser
            logprobs=logprobs,
        )

    def _check_vocabulary(self) -> None:
        size = self._ready.vocab_size
        named = {"stop_token_ids": self._wish.stop_token_ids, "logit_bias": [t for t, _ in self._wish.logit_bias]}
        for name, tokens in named.items():
            for token in tokens:
                if token >= size:
                    raise InvalidRequest(
                        f"{name}: token id {token} is outside the vocabulary: ids go from 0 to {size - 1}", name
                    )

    def _id(self, place: int, n_prompts: int) -> str:
        return self._name if n_prompts * self._wish.n_drawn == 1 else f"{self._name}/{place}"
