"""Streaming client of both completion APIs: request bodies, server-sent events, and timing of one completion.

An event's time is when the bytes that completed it were read from the socket.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from benchmarks.http_client import Connection, NoResponseError, ProtocolError, Response, error_text

_SUCCESSFUL_FINISHES = ("length", "stop", None)
_DONE = b"[DONE]"


class Event(NamedTuple):
    """A server-sent event. A tuple, since thousands are created each second on the machine being measured."""

    name: bytes
    data: bytes


class EventParser:
    """Incremental parser of server-sent events.

    It supports what the service uses: `event:` and `data:` lines; it skips comments and other fields, and an empty line
    ends an event (https://html.spec.whatwg.org/multipage/server-sent-events.html, section 9.2.6). A line may be split
    anywhere between two feeds.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        *lines, self._tail = (self._tail + data).split(b"\n")
        return [event for line in lines if (event := self._take(line.rstrip(b"\r"))) is not None]

    def _take(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        elif field == b"event":
            self._name = value.removeprefix(b" ")
        return None

    def _dispatch(self) -> Event | None:
        name, data = self._name, self._data
        self._name, self._data = b"", []
        return Event(name or b"message", b"\n".join(data)) if data else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Measurements of one successful stream."""

    first_token: float | None
    """Seconds from the request being sent to the first `token` event with text; None if no event had any."""
    gaps: list[float]
    """Seconds between consecutive `token` events. An event may carry several tokens; gaps are not weighted."""
    tokens: int
    """`usage.completion_tokens` of the `done` event."""
    cached: int = 0
    """Prompt tokens that were in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An error response, an `error` event, or a broken connection; the message is for the user."""

    message: str


@dataclass(slots=True, kw_only=True)
class NativeTimeline:
    """State of one stream. Times are seconds of any one clock."""

    sent: float
    first_text: float | None = None
    arrivals: list[float] = field(default_factory=list)

    def take(self, event: Event, now: float) -> Completed | Failed | None:
        """Records an event; returns the outcome at the terminal one. Raises msgspec.MsgspecError for invalid data."""
        if event.name == b"token":
            self._take_token(event, now)
        elif event.name == b"done":
            return self._finish(msgspec.json.decode(event.data, type=_Done))
        elif event.name == b"error":
            return Failed(error_message(event.data))
        return None

    def _take_token(self, event: Event, now: float) -> None:
        self.arrivals.append(now)
        if self.first_text is None and msgspec.json.decode(event.data, type=_Token).text:
            self.first_text = now

    def _finish(self, done: _Done) -> Completed | Failed:
        for choice in done.choices:
            if choice.finish_reason not in _SUCCESSFUL_FINISHES:
                return Failed(printable(f"the stream ended early: finish_reason {choice.finish_reason}"))
        return Completed(
            first_token=None if self.first_text is None else self.first_text - self.sent,
            gaps=[after - before for before, after in pairwise(self.arrivals)],
            tokens=done.usage.completion_tokens,
            cached=done.usage.prompt_tokens_details.cached_tokens,
        )


def error_message(body: bytes) -> str:
    """The message of an error body, or its start if it has another format."""
    try:
        answer: Any = msgspec.json.decode(body)
        return printable(str(answer["error"]["message"]))
    except (msgspec.MsgspecError, LookupError, TypeError):
        return printable(body.decode("utf-8", "replace")) or "no reason given"


def printable(text: str) -> str:
    """The text as one line of at most 200 characters, without control characters."""
    return "".join(c if c.isprintable() else " " for c in text[:200]).strip()


class _Token(msgspec.Struct):
    text: str


class _DoneChoice(msgspec.Struct):
    finish_reason: str | None = None


class _Cached(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _DoneUsage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: _Cached = _Cached()


class _Done(msgspec.Struct):
    usage: _DoneUsage
    choices: list[_DoneChoice] = []


@dataclass(slots=True, kw_only=True)
class OpenAITimeline:
    """State of one stream. Times are seconds of any one clock."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    """Arrival times of chunks with text; some servers also send chunks without."""
    tokens: int | None = None
    finish: str | None = None

    def take(self, event: Event, now: float) -> Completed | Failed | None:
        """Records an event; returns the outcome at the last one. Raises msgspec.MsgspecError for invalid data."""
        if event.data == _DONE:
            return self._finish()
        chunk = msgspec.json.decode(event.data, type=_Chunk)
        if chunk.error is not None:
            return Failed(error_message(event.data))
        for choice in chunk.choices:
            if choice.text:
                self.arrivals.append(now)
            self.finish = choice.finish_reason or self.finish
        if chunk.usage is not None:
            self.tokens = chunk.usage.completion_tokens
        return None

    def _finish(self) -> Completed | Failed:
        if self.finish not in _SUCCESSFUL_FINISHES:
            return Failed(printable(f"the stream ended early: finish_reason {self.finish}"))
        if self.tokens is None:
            return Failed("the stream told no usage, so its tokens cannot be counted")
        return Completed(
            first_token=self.arrivals[0] - self.sent if self.arrivals else None,
            gaps=[after - before for before, after in pairwise(self.arrivals)],
            tokens=self.tokens,
        )


class _ChunkChoice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _ChunkUsage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    usage: _ChunkUsage | None = None
    error: dict[str, Any] | None = None


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /complete. With `ignore_eos` each stream gives exactly `max_tokens`."""

    prompt: str | list[int]
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool = True
    stream: bool = True


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Requests a last chunk with the number of tokens."""

    include_usage: bool = True


class OpenAIRequest(CompletionRequest, frozen=True, kw_only=True):
    """The body of POST /v1/completions; disables filters that some servers apply by default."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stream_options: StreamOptions = msgspec.field(default_factory=StreamOptions)


async def complete(connection: Connection, request: CompletionRequest) -> Completed | Failed:
    """Runs one completion. Errors of the server or the network are returned as Failed, never raised."""
    try:
        return await _complete(connection, request)
    except (OSError, ProtocolError, msgspec.MsgspecError) as error:
        connection.close()
        return Failed(printable(error_text(error)))


async def _complete(connection: Connection, request: CompletionRequest) -> Completed | Failed:
    is_new_connection = await connection.open()
    body = msgspec.json.encode(request)
    is_openai = isinstance(request, OpenAIRequest)
    path = "/v1/completions" if is_openai else "/complete"
    sent = time.perf_counter()
    try:
        response = await connection.request("POST", path, body)
    except (NoResponseError, ConnectionError):
        if is_new_connection:
            raise
        # llama-server announces keep-alive but closes after each stream: retry on a new connection, as any client does.
        connection.close()
        await connection.open()
        sent = time.perf_counter()
        response = await connection.request("POST", path, body)
    timeline = OpenAITimeline(sent=sent) if is_openai else NativeTimeline(sent=sent)
    if response.status != 200:
        return Failed(f"HTTP {response.status}: {error_message(await response.read_all())}")
    return await _read_events(response, timeline)


async def _read_events(response: Response, timeline: NativeTimeline | OpenAITimeline) -> Completed | Failed:
    """Reads the body to its end, even after the terminal event, so that the connection can be reused."""
    parser = EventParser()
    outcome: Completed | Failed | None = None
    while piece := await response.read():
        now = time.perf_counter()
        for event in parser.feed(piece):
            outcome = outcome or timeline.take(event, now)
    if outcome is None:
        raise ProtocolError("the stream ended without a done event")
    return outcome
