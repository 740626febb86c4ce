"""Streams that are long enough to be interrupted, and their outcomes."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

BODY = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "seed": 7}


@dataclass(slots=True)
class Stream:
    """Mutable, filled by one thread; read by others at any time."""

    texts: dict[int, str] = field(default_factory=dict)
    """Text of each choice."""
    at: list[float] = field(default_factory=list)
    """Arrival time of each token, in seconds."""
    last: str = ""
    """The name of the last event, or of the fault."""

    def read(self, url: str, **more: Any) -> None:
        """Reads the stream to its end."""
        began = time.monotonic()
        try:
            with httpx.stream("POST", f"{url}/complete", json={**BODY, **more}, timeout=120) as response:
                for line in response.iter_lines():
                    if line.startswith("event: "):
                        self.last = line.removeprefix("event: ")
                    elif line.startswith("data: ") and self.last == "token":
                        self._take(json.loads(line.removeprefix("data: ")), time.monotonic() - began)
        except httpx.HTTPError as error:
            self.last = repr(error)

    def _take(self, token: dict[str, Any], now: float) -> None:
        self.at.append(now)
        self.texts[token["index"]] = self.texts.get(token["index"], "") + token["text"]


class ConcurrentStreams:
    """Concurrent streams of sixteen texts each: four take some seconds."""

    def __init__(self, url: str, streams: int = 4) -> None:
        self.streams = [Stream() for _ in range(streams)]
        arguments = [{"url": url, "n": 16, "seed": seed} for seed in range(streams)]
        self._threads = [
            threading.Thread(target=stream.read, kwargs=more)
            for stream, more in zip(self.streams, arguments, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def tokens(self) -> int:
        """Number of tokens received so far."""
        return sum(len(stream.at) for stream in self.streams)

    def texts(self) -> list[dict[int, str]]:
        """Waits for all. Raises AssertionError where one did not end with `done`."""
        for thread in self._threads:
            thread.join()
        assert {stream.last for stream in self.streams} == {"done"}, [stream.last for stream in self.streams]
        return [stream.texts for stream in self.streams]

    def longest_pause(self) -> float:
        """Longest time without a token of any stream, in seconds; call it after texts()."""
        at = sorted(moment for stream in self.streams for moment in stream.at)
        return max(after - before for before, after in pairwise(at))


def visit_until_refused(url: str, visits: list[Stream]) -> None:
    """One stream after the other; the last is one that did not end with `done`."""
    last = "done"
    while last == "done":
        visits.append(stream := Stream())
        stream.read(url, n=16)
        last = stream.last
