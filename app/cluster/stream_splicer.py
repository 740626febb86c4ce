"""What the client of one stream has been told, so that another replica's words can go on with it. No I/O, no clock.

replica A:  start  "Once "  "upon a"  x (it died)
client:     start  "Once "  "upon a"
replica B:  start  "Once upon"  " a time"  done          the same seed: the same text, in other pieces
client:                         " time"    done          what it has already is checked, and not sent again
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.cluster.sse_frames import Frame
from app.http.sse import PING

_SAME = ("weights_version", "seed", "prompt_tokens", "settings")
_EARLY = ("cancelled", "timeout")
"""Ends that have nothing to do with the text: they may come before all that was told was repeated."""


class Divergence(Exception):
    """The replica that was asked again does not say what the first one has said."""


@dataclass(slots=True)
class _Choice:
    """One continuation. What was said is counted by all replicas together, what was heard by the present one."""

    said: list[str] = field(default_factory=list)
    n_said: int = 0
    """Tokens, where they are told."""
    before: str = ""
    """All that was said before the present replica began."""
    n_before: int = 0
    heard: int = 0
    n_heard: int = 0

    def begin_again(self) -> None:
        self.before, self.n_before = "".join(self.said), self.n_said
        self.said, self.heard, self.n_heard = [self.before], 0, 0

    def news(self, text: str, tokens: list[Any]) -> tuple[str, list[Any]]:
        """What is new of this. Raises Differs."""
        known = self.before[self.heard : self.heard + len(text)]
        if not text.startswith(known):
            raise Divergence
        new, new_tokens = text[len(known) :], tokens[max(0, self.n_before - self.n_heard) :]
        self.heard += len(text)
        self.n_heard += len(tokens)
        self.said.append(new)
        self.n_said += len(new_tokens)
        return new, new_tokens

    @property
    def is_repeated(self) -> bool:
        return self.heard >= len(self.before)


class StreamSplicer:
    """One stream's; its events are numbered anew, for another replica cuts the text elsewhere."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._start: dict[str, Any] | None = None
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._next_number = 0
        self.is_over = False
        """Whether the last event was `done` or `error`."""

    @property
    def has_text(self) -> bool:
        """Whether anything was said that another replica must repeat."""
        return self._start is not None

    def request(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What another replica must be asked for."""
        return dict(body) if self._start is None else {**body, "seed": self._start["seed"]}

    def begin_again(self) -> None:
        """What comes next is from a replica that begins at the beginning."""
        for choice in self._choices.values():
            choice.begin_again()

    def take(self, frame: Frame) -> bytes:
        """What the client gets of it; nothing where it has all of it. Raises Differs."""
        match frame.name:
            case "token":
                return self._token(frame)
            case "start":
                return self._begin(frame)
            case "queue" if self._start is not None:  # to a client it is running
                return PING
            case "done":
                self._check_end(json.loads(frame.data))
                self.is_over = True
            case "error":
                return self.error(json.loads(frame.data))
            case "":
                return frame.data + b"\n\n"
        return self._numbered(frame.name, frame.data)

    def error(self, body: Mapping[str, Any]) -> bytes:
        """The last event of a stream that cannot go on."""
        self.is_over = True
        error = {**body["error"], "request_id": self._request_id}
        return self._numbered("error", json.dumps({"error": error}).encode("ascii"))

    def _begin(self, frame: Frame) -> bytes:
        start = json.loads(frame.data)
        if self._start is None:
            self._start = {**start, "id": self._request_id}
            return self._numbered("start", json.dumps(self._start).encode("ascii"))
        if any(start[name] != self._start[name] for name in _SAME):
            raise Divergence
        return b""

    def _token(self, frame: Frame) -> bytes:
        event = json.loads(frame.data)
        text, tokens = event["text"], event.get("tokens", [])
        new, new_tokens = self._choices[event["index"]].news(text, tokens)
        if len(new) == len(text) and len(new_tokens) == len(tokens):
            return self._numbered("token", frame.data)
        if not new and not new_tokens:
            return b""
        event["text"] = new
        if tokens:
            event["tokens"] = new_tokens
        return self._numbered("token", json.dumps(event).encode("ascii"))

    def _check_end(self, done: Mapping[str, Any]) -> None:
        for choice in done["choices"]:
            if choice["finish_reason"] not in _EARLY and not self._choices[choice["index"]].is_repeated:
                raise Divergence

    def _numbered(self, name: str, data: bytes) -> bytes:
        number, self._next_number = self._next_number, self._next_number + 1
        return f"id: {self._request_id}:{number}\nevent: {name}\ndata: ".encode("ascii") + data + b"\n\n"
