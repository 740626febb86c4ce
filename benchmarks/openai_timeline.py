"""Timeline of one /v1/completions stream, built from its events. The caller passes the time.

Data alone: chunks of JSON, the last of them with the usage, then `[DONE]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from benchmarks.sse import Event
from benchmarks.timeline import FINISHED, Completed, Failed, printable, reason

_END = b"[DONE]"


@dataclass(slots=True, kw_only=True)
class OpenAITimeline:
    """Mutable, owned by one stream. Times are seconds of one clock, whichever it is."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    """Of chunks with text: some servers send others, some do not."""
    tokens: int | None = None
    finish: str | None = None

    def take(self, event: Event, now: float) -> Completed | Failed | None:
        """Notes the event; the last one gives the outcome. Raises msgspec.MsgspecError if the data is wrong."""
        if event.data == _END:
            return self._finish()
        chunk = msgspec.json.decode(event.data, type=_Chunk)
        if chunk.error is not None:
            return Failed(reason(event.data))
        for choice in chunk.choices:
            if choice.text:
                self.arrivals.append(now)
            self.finish = choice.finish_reason or self.finish
        if chunk.usage is not None:
            self.tokens = chunk.usage.completion_tokens
        return None

    def _finish(self) -> Completed | Failed:
        if self.finish not in FINISHED:
            return Failed(printable(f"the stream ended early: finish_reason {self.finish}"))
        if self.tokens is None:
            return Failed("the stream told no usage, so its tokens cannot be counted")
        return Completed(
            first_token=self.arrivals[0] - self.sent if self.arrivals else None,
            gaps=[after - before for before, after in pairwise(self.arrivals)],
            tokens=self.tokens,
        )


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None
