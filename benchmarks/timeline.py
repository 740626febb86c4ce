"""Timeline of one completion stream, built from its events. The caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from benchmarks.sse import Event

FINISHED = ("length", "stop", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """What one good stream showed."""

    first_token: float | None
    """Seconds from the request being sent to the first `token` event with text; None if no event had any."""
    gaps: list[float]
    """Seconds between one `token` event and the next. An event may carry several tokens: nothing is weighted."""
    tokens: int
    """`usage.completion_tokens` of the `done` event."""
    cached: int = 0
    """Tokens of the prompt that were found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A refusal, an `error` event, or a connection that broke; the message is for the user."""

    message: str


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Mutable, owned by one stream. Times are seconds of one clock, whichever it is."""

    sent: float
    first_text: float | None = None
    arrivals: list[float] = field(default_factory=list)

    def take(self, event: Event, now: float) -> Completed | Failed | None:
        """Notes the event; a terminal one gives the outcome. Raises msgspec.MsgspecError if the data is wrong."""
        if event.name == b"token":
            self._take_token(event, now)
        elif event.name == b"done":
            return self._finish(msgspec.json.decode(event.data, type=_Done))
        elif event.name == b"error":
            return Failed(reason(event.data))
        return None

    def _take_token(self, event: Event, now: float) -> None:
        self.arrivals.append(now)
        if self.first_text is None and msgspec.json.decode(event.data, type=_Token).text:
            self.first_text = now

    def _finish(self, done: _Done) -> Completed | Failed:
        for choice in done.choices:
            if choice.finish_reason not in FINISHED:
                return Failed(printable(f"the stream ended early: finish_reason {choice.finish_reason}"))
        return Completed(
            first_token=None if self.first_text is None else self.first_text - self.sent,
            gaps=[after - before for before, after in pairwise(self.arrivals)],
            tokens=done.usage.completion_tokens,
            cached=done.usage.prompt_tokens_details.cached_tokens,
        )


def reason(body: bytes) -> str:
    """The message of an error body, or its beginning if it is not one of ours."""
    try:
        answer: Any = msgspec.json.decode(body)
        return printable(str(answer["error"]["message"]))
    except (msgspec.MsgspecError, LookupError, TypeError):
        return printable(body.decode("utf-8", "replace")) or "no reason given"


def printable(text: str) -> str:
    """One line, at most 200 characters, nothing that moves a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in text[:200]).strip()


class _Token(msgspec.Struct):
    text: str


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Cached(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens_details: _Cached = _Cached()


class _Done(msgspec.Struct):
    usage: _Usage
    choices: list[_Choice] = []
