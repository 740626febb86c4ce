"""Client threads that read long responses while a test breaks something, and their outcomes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from app.http.sse import Event, EventParser


@dataclass(slots=True)
class Reader:
    """One request and its response so far: one thread fills it, and others may read it at any time."""

    body: dict[str, Any]
    path: str = "/complete"
    began: float = 0.0
    texts: dict[int, str] = field(default_factory=dict)
    """Text of each choice."""
    at: list[float] = field(default_factory=list)
    """Seconds from the start of the request to each token, or to the whole response."""
    numbers: list[int] = field(default_factory=list)
    """Numbers from the event ids."""
    end: str = ""
    """"done", "error" (an error that the API documents), or a fault that no client may see; empty if cut off."""

    def read(self, url: str) -> None:
        """Sends the request, and reads the response to its end."""
        self.began = time.monotonic()
        parser = EventParser()
        try:
            with httpx.stream("POST", f"{url}{self.path}", json=self.body, timeout=180) as response:
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    self._take_whole(response.status_code, json.loads(response.read()))
                else:
                    for data in response.iter_bytes():
                        for event in parser.feed(data):
                            self._take(event)
        except (httpx.HTTPError, KeyError, ValueError) as fault:
            self.end = repr(fault)

    def _take_whole(self, status: int, answer: dict[str, Any]) -> None:
        if status == 200:
            self._add(0, answer["choices"][0]["text"])
            self.end = "done"
        else:
            self.end = "error" if answer["error"]["type"] == "unavailable_error" else str(answer)

    def _take(self, event: Event) -> None:
        if event.id:
            self.numbers.append(int(event.id.rpartition(":")[2]))
        if not event.name:  # a comment
            return
        answer = {} if event.data == b"[DONE]" else json.loads(event.data)
        if "error" in answer:
            self.end = "error"
        elif event.name == "done" or not answer:
            self.end = self.end or "done"
        elif event.name == "token":
            self._add(answer["index"], answer["text"])
        elif event.name == "message":  # of /v1/completions
            self._add(0, answer["choices"][0]["text"])

    def _add(self, index: int, text: str) -> None:
        self.texts[index] = self.texts.get(index, "") + text
        self.at.append(time.monotonic() - self.began)


class ConcurrentReaders:
    """Runs readers concurrently, each in its own thread."""

    def __init__(self, url: str, readers: Sequence[Reader]) -> None:
        self.readers = readers
        self._threads = [threading.Thread(target=reader.read, args=[url], daemon=True) for reader in readers]
        for thread in self._threads:
            thread.start()

    @property
    def tokens(self) -> int:
        """Number of tokens received so far."""
        return sum(len(reader.at) for reader in self.readers)

    @property
    def streaming(self) -> int:
        """Number of streams that have started and not ended."""
        return sum(bool(reader.texts and not reader.end) for reader in self.readers)

    def join(self, seconds: float = 180.0) -> None:
        """Waits for all readers. Raises AssertionError if one is still reading after `seconds`."""
        ends = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), (
            f"a reader is still reading; {self.tokens} tokens so far"
        )

    def longest_pause(self) -> float:
        """Longest time in seconds in which no reader received a token; call it after join()."""
        at = sorted(reader.began + moment for reader in self.readers for moment in reader.at)
        return max(after - before for before, after in pairwise(at))
