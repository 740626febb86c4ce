"""Completion requests of both APIs, and the measurements of a completed stream."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import msgspec

from app.http.sse import EventParser
from benchmarks.client import Address, Exchange

_SUCCESSFUL_FINISHES = ("length", "stop", None)
_TEXT_START = 2_000
"""Bytes of a stream in which the first text is looked for first."""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /complete. With `ignore_eos` each stream gives exactly `max_tokens`."""

    prompt: str | list[int]
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool = True
    stream: bool = True

    PATH: ClassVar[str] = "/complete"
    MARKER: ClassVar[bytes] = b"event: token\n"
    """Bytes that occur exactly once in each token's event, and nowhere else, however a server spaces its JSON."""

    def exchange(self, address: Address) -> Exchange:
        """The request to a server."""
        return Exchange(address.request("POST", self.PATH, msgspec.json.encode(self)), self.MARKER)


class OpenAIRequest(CompletionRequest, frozen=True, kw_only=True):
    """The body of POST /v1/completions; disables filters that some servers apply by default."""

    PATH: ClassVar[str] = "/v1/completions"
    MARKER: ClassVar[bytes] = b'"text":'

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stream_options: dict[str, bool] = msgspec.field(default_factory=lambda: {"include_usage": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """Measurements of one successful stream, in seconds."""

    first_token: float | None
    """From the request being sent to the first token with text; None if no event had any."""
    gaps: list[float]
    """Between consecutive token events. An event may carry several tokens; gaps are not weighted."""
    tokens: int
    """`usage.completion_tokens`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An error response, an `error` event, or a broken connection; the message is for the user."""

    message: str


def measure(exchange: Exchange) -> Completed | Failed:
    """Measurements of an exchange that has ended. Errors of server and network are returned as Failed, never raised."""
    if exchange.error:
        return Failed(printable(exchange.error))
    body = exchange.body
    if exchange.status != 200:
        return Failed(f"HTTP {exchange.status}: {error_message(body)}")
    try:
        return _measure_chunks(exchange) if exchange.marker == OpenAIRequest.MARKER else _measure_events(exchange, body)
    except msgspec.MsgspecError as error:
        return Failed(printable(str(error)))


def _measure_events(exchange: Exchange, body: bytes) -> Completed | Failed:
    """Of a native stream: parses its first events, up to the first text, and its last one."""
    for event in EventParser().feed(body[max(body.rfind(b"event: error\n"), body.rfind(b"event: done\n"), 0) :]):
        if event.name == "error":
            return Failed(error_message(event.data))
        if event.name == "done":
            done = msgspec.json.decode(event.data, type=_Done)
            break
    else:
        return Failed("the stream ended without a done event")
    for choice in done.choices:
        if choice.finish_reason not in _SUCCESSFUL_FINISHES:
            return Failed(printable(f"the stream ended early: finish_reason {choice.finish_reason}"))
    first = _first_text(body[:_TEXT_START])
    first = _first_text(body) if first is None else first
    return _completed(exchange.sent, exchange.arrivals, first, done.usage.completion_tokens)


def _first_text(body: bytes) -> int | None:
    """Number of the first token event with text."""
    tokens = (event for event in EventParser().feed(body) if event.name == "token")
    return next((i for i, event in enumerate(tokens) if msgspec.json.decode(event.data, type=_Choice).text), None)


def _measure_chunks(exchange: Exchange) -> Completed | Failed:
    """Of OpenAI's API. Counts the arrivals of chunks with text; some servers also send chunks without."""
    arrivals, tokens, finish, times = [], None, None, iter(exchange.arrivals)
    for event in EventParser().feed(exchange.body):
        if event.data == b"[DONE]":
            break
        if not event.name:
            continue
        chunk = msgspec.json.decode(event.data, type=_Chunk)
        if chunk.error is not None:
            return Failed(error_message(event.data))
        for choice in chunk.choices:
            if choice.text is not None and (arrived := next(times)) and choice.text:
                arrivals.append(arrived)
            finish = choice.finish_reason or finish
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    else:
        return Failed("the stream ended without a done event")
    if finish not in _SUCCESSFUL_FINISHES:
        return Failed(printable(f"the stream ended early: finish_reason {finish}"))
    if tokens is None:
        return Failed("the stream told no usage, so its tokens cannot be counted")
    return _completed(exchange.sent, arrivals, 0 if arrivals else None, tokens)


def _completed(sent: float, arrivals: list[float], first: int | None, tokens: int) -> Completed:
    return Completed(
        first_token=None if first is None else arrivals[first] - sent,
        gaps=[after - before for before, after in pairwise(arrivals)],
        tokens=tokens,
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


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Done(msgspec.Struct):
    usage: _Usage
    choices: list[_Choice] = []


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None
