"""Generation session: engine requests out, token events in, completion events with deadlines, usage and timings out.

BuiltRequests makes the engine's requests, one per continuation, and their output choices of a generation request.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from app.common.errors import DeadlineExceeded, EngineError, InvalidRequest, QueueTimeout
from app.common.event_loop import LazyTimer
from app.common.ipc import Ready
from app.common.types import PromptScores, Request, RequestStarted, SampledEvent, SamplingParams
from app.engine_client.token_stream import Arrival, Cancelled, Consumer, Item, TokenStream, Writes
from app.generation.detokenizer import OutputChoice, PromptEcho, TextRules
from app.generation.prompt_encoder import EncodedPrompt
from app.generation.request import CompletionEvent, GenerationRequest, Heartbeat, Queued, Started
from app.generation.stop_matcher import MarkedStops
from model.tokenizer.infill import infill_tokens
from model.tokenizer.tokenizer import Tokenizer

_QUEUE_EVENT_SECONDS = 1.0


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
    begun: float = field(init=False)
    """Like `submitted`, which pauses postpone."""
    tokenizing: float | None = None
    compiling: float | None = None
    """When its grammar began to be compiled; None for a request without one."""
    queued: float | None = None
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    paused_seconds: float = 0.0
    """Seconds between the first and the last token for which the request was paused."""

    def __post_init__(self) -> None:
        self.begun = self.submitted


class GenerationSession:
    """Owns a token stream; the consumer of wait_event() and `events` must always call close()."""

    __slots__ = (  # as in TokenStream
        *("stream", "choices", "times", "prompt_tokens", "cached_tokens", "inter_token_latencies", "events"),
        *("last_event_at", "_timeouts", "_deadline", "_paused_at", "_paused_seconds", "_started", "_failure"),
        *("_queued_at", "_timer", "_consumer", "_n_open"),
    )

    def __init__(
        self, stream: TokenStream, choices: Sequence[OutputChoice], timeouts: Timeouts, times: SessionTimes
    ) -> None:
        self.stream = stream
        self.choices = choices
        self._n_open = len(choices)
        self.times = times
        leaders = [request for request in stream.requests if request.leader is None]
        self.prompt_tokens = sum(len(leader.prompt) + len(leader.source) for leader in leaders)
        """Tokens of prompts and sources; a prompt with several choices counts once."""
        self.cached_tokens = 0
        self.inter_token_latencies: list[float] = []
        """Inter-token latencies in seconds since the metrics last collected them."""
        self._timeouts = timeouts
        self._deadline = times.submitted + timeouts.deadline
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        """Paused seconds since the last token, not yet added to `times.paused_seconds`."""
        self._started: set[int] = set()
        self.events: deque[CompletionEvent] = deque()
        """Events that the consumer has not taken yet, in order."""
        self._consumer: Consumer | None = None
        """That of the consumer which awaits wait_event()."""
        self._failure: Exception | None = None
        self.last_event_at = self._queued_at = time.monotonic()
        """When the latest event was made, in monotonic seconds."""
        self._timer = LazyTimer(stream.wake)
        if stream.queue_position:
            self._emit(Queued(stream.queue_position))

    @property
    def n_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(choice.n_tokens for choice in self.choices)

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended and all events were taken."""
        return not self.events and self._failure is None and not self._n_open

    def close(self) -> None:
        """Releases the engine's resources of this request; idempotent."""
        self.stream.close()
        self._timer.cancel()

    @property
    def duration(self) -> float:
        """Seconds from the submission until now, or until the client disconnected."""
        return (
            (self._paused_at or time.monotonic())
            - self.times.submitted
            - self.times.paused_seconds
            - self._paused_seconds
        )

    def pause(self) -> None:
        """Pauses the request: releases its engine resources until resume()."""
        self.stream.pause()
        self._paused_at = time.monotonic()
        self.stream.incidents.append((self._paused_at, "client disconnected"))

    def resume(self) -> None:
        """The stream was submitted again: it is queued from now on, and the paused time does not count."""
        now, times = time.monotonic(), self.times
        self.stream.incidents.append((now, "client resumed the stream"))
        paused = now - (self._paused_at or now)
        self._paused_at, self._queued_at = None, now
        for choice in self.choices:
            choice.last_token_at = None
        if times.first_token is not None:
            self._paused_seconds += paused
            return
        times.submitted += paused
        times.started = None if times.started is None else times.started + paused

    async def wait_event(self, consumer: Consumer | None = None) -> bool:
        """Waits for an engine event or a timeout; False if that yields no completion event.

        consumer: called instead of waking the caller when something has arrived. It may handle the events; it returns
            whether to wait for more. What it raises is raised here.

        Raises EngineError if the request cannot continue.
        """
        if not self.events:
            if self._failure:
                raise self._failure
            self._timer.set(min(self.last_event_at + self._longest_silence, self._limit()))
            self._consumer = consumer
            self._on_arrivals(await self.stream.receive(consumer and self._consume))
            self._check_timeouts(time.monotonic())
        return bool(self.events)

    def _consume(self, writes: Writes) -> bool:
        assert self._consumer
        try:
            self._on_arrivals(self.stream.take())
            return self._consumer(writes) and not self._failure
        except Exception as error:  # concerns this request, not the engine whose report is being delivered
            self._failure = error
            return False

    def _emit(self, *events: CompletionEvent) -> None:
        if events:
            self.events.extend(events)
            self.last_event_at = time.monotonic()

    def _emit_end(self, choice: OutputChoice) -> None:
        assert choice.ended
        self._n_open -= 1
        self._emit(choice.ended)

    @property
    def _longest_silence(self) -> float:
        return self._timeouts.heartbeat if self.stream.queue_position is None else _QUEUE_EVENT_SECONDS

    def _check_timeouts(self, now: float) -> None:
        if now >= self._limit() and not self._failure:
            self._on_timeout(now)
        # Measured from the last completion event: tokens without text must not postpone the heartbeat.
        elif not self.events and now - self.last_event_at >= self._longest_silence:
            waiting = self.stream.queue_position
            self._emit(Heartbeat() if waiting is None else Queued(waiting))

    def _limit(self) -> float:
        """The next deadline in the current state."""
        limit = self._deadline
        if self.stream.queue_position is None:
            return limit
        return min(limit, self._queued_at + self._timeouts.queue)

    def _on_timeout(self, now: float) -> None:
        if self.stream.queue_position is not None and now < self._deadline:
            self._fail(QueueTimeout("the request waited too long for its turn: try again in a moment", 5))
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
                self._emit(*choice.finish(finish_reason))
                self._emit_end(choice)

    def _on_arrivals(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            choice, item = self.choices[arrival.choice], arrival.item
            if not isinstance(item, SampledEvent):
                self._on_item(arrival, choice, item)
            elif not choice.ended:
                self._on_token(arrival, choice, item)

    def _on_item(self, arrival: Arrival, choice: OutputChoice, item: Item) -> None:
        """Handles what is no token."""
        if isinstance(item, Cancelled):
            self._end_all("cancelled")
        elif isinstance(item, EngineError):
            self._fail(item)
        elif isinstance(item, RequestStarted):
            self._record_start(arrival, item)
        elif isinstance(item, PromptScores) and choice.echo:  # shared by all choices of the prompt; None once ended
            choice.echo.add(item)

    def _on_token(self, arrival: Arrival, choice: OutputChoice, event: SampledEvent) -> None:
        times, at = self.times, arrival.at
        times.first_token = times.first_token or at
        if event.token is not None:
            if choice.last_token_at is not None:
                self.inter_token_latencies.append(at - choice.last_token_at)
            choice.last_token_at = at
            if self._paused_seconds:
                times.paused_seconds, self._paused_seconds = times.paused_seconds + self._paused_seconds, 0.0
            times.last_token = at
        if deltas := choice.add(event):
            self.events.extend(deltas)
            self.last_event_at = time.monotonic()
        if choice.ended:
            self._emit_end(choice)
            if not event.finish:
                self.stream.cancel_sequence(arrival.choice)

    def _record_start(self, arrival: Arrival, started: RequestStarted) -> None:
        # A resumed stream starts again; its cache hits are then its own earlier work.
        if self.stream.requests[arrival.choice].leader is None and arrival.choice not in self._started:
            self.cached_tokens += started.cached_tokens
        self._started.add(arrival.choice)
        if self.stream.n_suspensions:  # the client caused the gap, not the engine
            self.choices[arrival.choice].last_token_at = None
        if self.times.started is None:
            self.times.started = arrival.at
            self._emit(Started())


def _end_ids(request: GenerationRequest, ready: Ready, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end the text: the model's; in a chat, all that its files name; in an infill, the family's too."""
    ends = [*tokenizer.end_ids(ready.eos_ids)]
    if request.is_chat:
        ends += tokenizer.chat_end_ids(ready.named_eos_ids)
    if request.suffix is not None and (tokens := infill_tokens(tokenizer)):
        ends += tokens.ends
    return tuple(dict.fromkeys(ends))


_MAX_LOGPROBS = 200_000


class BuiltRequests:
    """All sequences of one generation request: choice i of prompt p has the index p * n + i."""

    def __init__(
        self, name: str, request: GenerationRequest, ready: Ready, tokenizer: Tokenizer, cache_namespace: str
    ) -> None:
        self._name = name
        self._request = request
        self._ready = ready
        self._tokenizer = tokenizer
        self._salt = cache_namespace
        self._eos_ids = () if request.ignore_eos else _end_ids(request, ready, tokenizer)

    def _check_size(self, encoded: Sequence[EncodedPrompt]) -> None:
        """Raises InvalidRequest if the response would hold too many log-probabilities."""
        request, context = self._request, self._ready.context
        if request.logprobs is None:
            return
        per_token = 1 + request.logprobs
        max_sampled = 0 if request.is_streamed else request.max_tokens
        lengths = [
            (len(prompt.ids) if request.echo else 0) + min(max_sampled, context - len(prompt.ids)) for prompt in encoded
        ]
        size = sum(lengths) * request.n_sampled * per_token
        limit = max(_MAX_LOGPROBS, context * per_token)
        if size > limit:
            raise InvalidRequest(
                f"logprobs: the response could have {size} log-probabilities, the limit is {limit}: "
                "ask for fewer prompts, a smaller n, fewer tokens, or smaller logprobs",
                "logprobs",
            )

    def requests(self, encoded: Sequence[EncodedPrompt], source: tuple[int, ...], grammar: str = "") -> list[Request]:
        """The engine requests. Raises InvalidRequest."""
        request = self._request
        self._check_vocabulary()
        self._check_size(encoded)
        if request.min_tokens > request.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({request.min_tokens}) must not be above max_tokens ({request.max_tokens})", "min_tokens"
            )
        params = self._params()
        stop_ids = tuple(dict.fromkeys((*self._eos_ids, *request.stop_token_ids)))
        requests = []
        n_choices: Counter[tuple[int, ...]] = Counter()
        """By prompt: the continuations so far, if equal prompts vary."""
        for index, prompt in enumerate(encoded):
            first = n_choices[prompt.ids]
            if request.varies_equal_prompts:
                n_choices[prompt.ids] += request.n_sampled
            leader = Request(
                id=self._id(index * request.n_sampled, len(encoded)),
                prompt=prompt.ids,
                max_tokens=min(request.max_tokens, self._most_tokens(len(prompt.ids))),
                params=replace(params, choice=first),
                source=source,
                stop_ids=stop_ids,
                prompt_logprobs=request.logprobs if request.echo else None,
                grammar=grammar,
                cache_namespace=self._salt,
            )
            requests.append(leader)
            for choice in range(1, request.n_sampled):
                requests.append(
                    replace(
                        leader,
                        id=self._id(index * request.n_sampled + choice, len(encoded)),
                        params=replace(params, choice=first + choice),
                        prompt_logprobs=None,
                        leader=leader.id,
                    )
                )
        return requests

    def _most_tokens(self, prompt_tokens: int) -> int:
        """Tokens that fit the context after a prompt.

        A scored prompt that fills the context gets one, too: nothing follows it, so it needs no position. lm-eval
        sends such prompts with `max_tokens` 1, and takes the last entry of the log-probabilities for that token.
        """
        request, left = self._request, self._ready.context - prompt_tokens
        is_scored = request.echo and request.logprobs is not None and request.grammar is None
        return max(left, 1) if is_scored else left

    def choices(self, requests: Sequence[Request], encoded: Sequence[EncodedPrompt]) -> list[OutputChoice]:
        """The output choices that consume the events of `requests`."""
        request = self._request
        rules = TextRules(
            stops=request.stops,
            marked_stops=MarkedStops.of(request.stops, self._tokenizer.special_ids),
            include_stop=request.include_stop,
            min_tokens=request.min_tokens,
            eos_ids=frozenset(self._eos_ids),
        )
        echoes = [self._echo(prompt) if request.echo else None for prompt in encoded]
        return [
            OutputChoice(index, engine_request, self._tokenizer, rules, echoes[index // request.n_sampled])
            for index, engine_request in enumerate(requests)
        ]

    def _echo(self, prompt: EncodedPrompt) -> PromptEcho:
        is_scored = self._request.logprobs is not None
        return PromptEcho(prompt.text, prompt.ids, self._tokenizer, is_scored=is_scored, starts=prompt.starts)

    def _params(self) -> SamplingParams:
        """The request's values, or the model's defaults, or no filter; a random seed if none was given."""
        request = self._request
        requested = {name: value for name, value in request.sampling.items() if value is not None}
        defaults = self._ready.sampling_defaults if request.use_model_defaults else {}
        values: dict[str, Any] = {"top_k": 0, **defaults, **requested}
        # best_of ranks by the log-probabilities of the sampled tokens.
        logprobs = 0 if request.logprobs is None and request.is_ranked else request.logprobs
        return SamplingParams(
            **{**values, "top_k": max(0, int(values["top_k"]))},
            logit_bias=request.logit_bias,
            min_tokens=request.min_tokens,
            seed=secrets.randbits(53) if request.seed is None else request.seed,  # 53 bits survive every JSON parser
            logprobs=logprobs,
        )

    def _check_vocabulary(self) -> None:
        size = self._ready.vocab_size
        request = self._request
        named = {"stop_token_ids": request.stop_token_ids, "logit_bias": [token for token, _ in request.logit_bias]}
        for name, tokens in named.items():
            for token in tokens:
                if token >= size:
                    raise InvalidRequest(
                        f"{name}: token id {token} is outside the vocabulary: ids go from 0 to {size - 1}", name
                    )

    def _id(self, index: int, n_prompts: int) -> str:
        return self._name if n_prompts * self._request.n_sampled == 1 else f"{self._name}/{index}"
