"""What a client has of a stream of either API, and the field `resume` with which it goes on at another service."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.completion_client import parse_events


@dataclass(slots=True)
class _Choice:
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """Log-probabilities of the tokens; with their ids, texts and alternatives in the native format."""
    end: tuple[Any, Any] | None = None


@dataclass(slots=True)
class Received:
    """What arrived of one response, over any number of connections."""

    n_choices: int = 1
    start: dict[str, Any] = field(default_factory=dict)
    """The event `start`, or the first chunk."""
    last_id: str = ""
    """Of the last event of a native stream."""
    numbers: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    is_done: bool = False
    error: dict[str, Any] = field(default_factory=dict)
    choices: list[_Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [_Choice() for _ in range(self.n_choices)]

    @property
    def is_native(self) -> bool:
        """Whether its events have ids."""
        return bool(self.last_id)

    def take(self, block: bytes) -> None:
        """Takes one event or chunk, without the empty line behind it."""
        block = b"\n".join(line for line in block.split(b"\n") if not line.startswith(b":"))  # heartbeats
        if block.startswith(b"id:"):
            self._take_event(block)
        elif block == b"data: [DONE]":
            self.is_done = True
        elif block:
            self._take_chunk(json.loads(block.removeprefix(b"data: ")))

    def _take_event(self, block: bytes) -> None:
        (event,) = parse_events(f"{block.decode()}\n\n")
        self.last_id = event.id
        self.numbers.append(int(event.id.rpartition(":")[2]))
        if event.name == "start":
            assert not self.start, "a second start"
            self.start = event.data
        elif event.name == "token":
            choice = self.choices[event.data["index"]]
            choice.text += event.data["text"]
            choice.ids += event.data.get("token_ids", [])
            choice.logprobs += event.data.get("tokens", [])
        elif event.name == "done":
            self.is_done = True
            for end in event.data["choices"]:
                self.choices[end["index"]].end = (end["finish_reason"], end["stop_reason"])
            self.usage = event.data["usage"]
        elif event.name == "error":
            self.is_done, self.error = True, event.data["error"]

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.start = self.start or chunk
        self.usage = chunk.get("usage") or self.usage
        for part in chunk["choices"]:
            choice = self.choices[part["index"]]
            assert choice.end is None, "a chunk after the finish reason"
            choice.text += part["text"]
            choice.ids += part.get("token_ids", [])
            if part["logprobs"]:
                choice.logprobs += zip(*part["logprobs"].values(), strict=True)
            if part["finish_reason"]:
                choice.end = (part["finish_reason"], part["stop_reason"])

    def body(self, body: dict[str, Any], *, with_ids: bool = True) -> dict[str, Any]:
        """The body of the request that goes on; the first one if nothing arrived that says what determines the text."""
        if not self.start:
            return body
        has_logprobs = body.get("logprobs") is not None
        choices = [
            {
                "text": choice.text,
                **({"token_ids": choice.ids} if with_ids else {}),
                **({"logprobs": len(choice.logprobs)} if has_logprobs else {}),
                **({"finish_reason": choice.end[0]} if choice.end and not self.is_native else {}),
            }
            for choice in self.choices
        ]
        resume: dict[str, Any] = {"receipt": self.start, "choices": choices}
        if self.is_native:
            resume["after"] = int(self.last_id.rpartition(":")[2])
        return {**body, "resume": resume}

    @property
    def outcome(self) -> dict[str, Any]:
        """Everything that must not depend on where the stream broke."""
        return {
            "choices": [(choice.text, choice.ids, choice.logprobs, choice.end) for choice in self.choices],
            "completion_tokens": self.usage.get("completion_tokens"),
            "prompt_tokens": self.usage.get("prompt_tokens"),
            "is_done": self.is_done,
            "error": self.error,
            "numbers_are_whole": self.numbers == list(range(len(self.numbers))),
        }


def received(content: bytes, n_choices: int = 1, *, n_blocks: int | None = None) -> Received:
    """What a client has after the first `n_blocks` events of a response, or all."""
    found = Received(n_choices)
    for block in content.split(b"\n\n")[:-1][:n_blocks]:
        found.take(block)
    return found
