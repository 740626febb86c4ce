"""One completion from token ids to text: decoding, stop strings, usage, timings. Knows no HTTP and no JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from app.engine.errors import EngineError
from app.engine.stream import Cancelled, Item, Stream
from app.engine.types import Started, TokenEvent
from app.text import StopMatcher, StreamDecoder
from model.tokenizer import Tokenizer

_QUEUE_NEWS_SECONDS, _HEARTBEAT_SECONDS = 1.0, 10.0


@dataclass(frozen=True, slots=True)
class Queued:
    """Still waiting, behind `position` others."""

    position: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing new for a while; the connection should show a sign of life."""


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """One token and its log-probability; `top` are the most likely ones in its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, with the tokens it ends (empty unless log-probabilities were asked for)."""

    text: str
    tokens: tuple[TokenDetail, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The regular end."""

    finish_reason: str
    stop_reason: str | int | None = None


News = Queued | Idle | Started | Delta | Ended


@dataclass(slots=True)
class Clock:
    """When things happened to a request, in seconds of a monotonic clock."""

    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Completion:
    """Owns a Stream; whoever iterates news() must close() in the end, whatever happens."""

    def __init__(self, stream: Stream, tokenizer: Tokenizer, stops: tuple[str, ...]) -> None:
        self.clock = Clock()
        self.cached_tokens = 0
        self.n_tokens = 0
        self.gaps: list[float] = []
        """Seconds between tokens since the last time somebody took them."""
        self._stream = stream
        self.tokenizer = tokenizer
        self._decoder = StreamDecoder()
        # A prompt of special tokens alone is no text yet, and what follows is its beginning.
        nothing_yet = not any(tokenizer.token_bytes(token) for token in stream.request.prompt)
        self._strips_space = nothing_yet and tokenizer.strips_first_space
        self._matcher = StopMatcher(stops)
        self._decoded = self._sent = 0
        self._held: deque[tuple[int, int, TokenDetail]] = deque()  # (first character, end, token)

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were read: of the prompt, and of a source."""
        return len(self._stream.request.prompt) + len(self._stream.request.source)

    def close(self) -> None:
        """Frees what the engine holds for this request; any number of times."""
        self._stream.close()

    def usage(self) -> dict[str, Any]:
        """Token counts of the engine: EOS and tokens behind a stop string count."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.n_tokens,
            "total_tokens": self.prompt_tokens + self.n_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timings(self) -> dict[str, float]:
        """Milliseconds; what has not happened is 0."""
        clock = self.clock
        started = clock.started or clock.submitted
        first = clock.first_token or started
        decode = (clock.last_token or first) - first
        return {
            "queue_ms": round((started - clock.submitted) * 1e3, 3),
            "prefill_ms": round((first - started) * 1e3, 3),
            "first_token_ms": round((first - clock.submitted) * 1e3, 3),
            "decode_ms": round(decode * 1e3, 3),
            "tokens_per_second": round((self.n_tokens - 1) / decode, 2) if decode > 0 else 0.0,
        }

    async def news(self) -> AsyncGenerator[News, None]:
        """Everything that happens, up to and with Ended. Raises EngineError where the engine fails."""
        last = time.monotonic()
        if (position := self._stream.queue_position) is not None and position > 0:
            yield Queued(position)
        while True:
            pause = _HEARTBEAT_SECONDS if self._stream.queue_position is None else _QUEUE_NEWS_SECONDS
            items: list[tuple[float, Item]] = []
            # Counted from the last news: tokens without text must not put the sign of life off.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, last + pause - time.monotonic())):
                    items = await self._stream.receive()
            for arrived, item in items:
                for news in self._take(item, arrived):
                    yield news
                    last = time.monotonic()
                    if isinstance(news, Ended):
                        return
            if time.monotonic() - last >= pause:
                waiting = self._stream.queue_position
                yield Idle() if waiting is None else Queued(waiting)
                last = time.monotonic()

    def _take(self, item: Item, arrived: float) -> list[News]:
        if isinstance(item, Cancelled):
            return [*self._flush(), *self._delta("", final=True), Ended("cancelled")]
        if isinstance(item, EngineError):
            raise item
        if isinstance(item, Started):
            self.clock.started, self.cached_tokens = arrived, item.cached_tokens
            return [item]
        return self._take_token(item, arrived)

    def _take_token(self, event: TokenEvent, now: float) -> list[News]:
        text = self._decode(event, now)
        delta = self._delta(self._matcher.feed(text), final=False)
        if self._matcher.matched is None and event.finish is None:
            return delta
        if self._matcher.matched is None:
            delta += self._flush()
        delta += self._delta("", final=True)
        if self._matcher.matched is not None:
            self.close()
            return [*delta, Ended("stop", self._matcher.matched)]
        return [*delta, Ended(str(event.finish))]

    def _decode(self, event: TokenEvent, now: float) -> str:
        """Text that the token completes; notes the time, and the token for those who want details."""
        if event.token is None:
            return ""
        if self.clock.last_token is not None:
            self.gaps.append(now - self.clock.last_token)
        self.clock.first_token = self.clock.first_token or now
        self.clock.last_token = now
        self.n_tokens += 1
        # A token that ends the text is none of it, whatever the tokenizer would show for it.
        ends = event.token in self._stream.request.stop_ids
        data = b"" if ends else self.tokenizer.token_bytes(event.token)
        if self._strips_space and data:
            data, self._strips_space = data.removeprefix(b" "), False
        text = self._decoder.feed(data)
        if event.logprob is not None:
            detail = TokenDetail(event.token, event.logprob, event.top)
            self._held.append((self._decoded, self._decoded + len(text), detail))
        self._decoded += len(text)
        return text

    def _flush(self) -> list[News]:
        text = self._matcher.feed(self._decoder.flush()) + self._matcher.flush()
        return self._delta(text, final=False)

    def _delta(self, text: str, *, final: bool) -> list[News]:
        """A Delta, if there is anything to say.

        Tokens wait for their text, also those that only begin a character; those behind a stop are never shown.
        """
        self._sent += len(text)
        everything = final and self._matcher.matched is None
        ready = []
        while self._held:
            first, end, detail = self._held[0]
            if not (everything or (first < self._sent and (final or end <= self._sent))):
                break
            ready.append(detail)
            self._held.popleft()
        return [Delta(text, tuple(ready))] if text or ready else []


def prompt_sha256(prompt: str | list[int]) -> str:
    """For the receipt: SHA-256 of the text in UTF-8, or of the ids in decimal with commas."""
    text = prompt if isinstance(prompt, str) else ",".join(map(str, prompt))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
