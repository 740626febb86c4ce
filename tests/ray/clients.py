"""Concurrent clients of the service on Ray, and how each of their responses ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import httpx

from app.http.sse import EventParser
from examples.resume import completion

BODY = {"prompt": "Once upon a time", "max_tokens": 80, "ignore_eos": True}
_RETRY_SECONDS = 60.0


@dataclass(slots=True)
class Client:
    """One request: one thread fills it, and others may read it at any time."""

    kind: str
    """resuming: examples/resume.py. plain: the same stream without resuming. v1: a stream of /v1/completions. whole:
    one response, requested again until it comes."""
    seed: int
    text: str = ""
    end: str = ""
    """done, or why it ended early; empty while it is read."""

    def read(self, url: str) -> None:
        """Reads the response to its end."""
        body = {**BODY, "seed": self.seed}
        try:
            pieces = {"resuming": completion, "plain": _plain, "v1": _v1, "whole": _whole}[self.kind](url, body)
            for piece in pieces:
                self.text += piece
            self.end = "done"
        except (httpx.HTTPError, OSError, RuntimeError, ValueError, KeyError) as error:
            self.end = repr(error)


class Clients:
    """Runs clients concurrently, each in a thread of its own."""

    def __init__(self, url: str, clients: Sequence[Client]) -> None:
        self.clients = clients
        self._threads = [threading.Thread(target=client.read, args=[url], daemon=True) for client in clients]
        for thread in self._threads:
            thread.start()

    @property
    def streaming(self) -> int:
        """Number of streams that have begun and not ended."""
        return sum(bool(client.text and not client.end) for client in self.clients)

    def join(self, seconds: float = 180.0) -> None:
        """Waits for all of them. Raises AssertionError if one is still reading after `seconds`."""
        ends = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        assert all(client.end for client in self.clients), "a client is still reading"


def _plain(url: str, body: dict[str, object]) -> Iterator[str]:
    for name, data in _events(f"{url}/complete", body):
        if name == "token":
            yield json.loads(data)["text"]
        elif name == "error":
            raise RuntimeError(data.decode())
        elif name == "done":
            return
    raise RuntimeError("the stream was cut")


def _v1(url: str, body: dict[str, object]) -> Iterator[str]:
    for name, data in _events(f"{url}/v1/completions", {**body, "stream": True}):
        if data == b"[DONE]":
            return
        if name:  # else a heartbeat
            yield json.loads(data)["choices"][0]["text"]
    raise RuntimeError("the stream was cut")


def _events(url: str, body: dict[str, object]) -> Iterator[tuple[str, bytes]]:
    parser = EventParser()
    with httpx.stream("POST", url, json=body, timeout=180) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            for event in parser.feed(chunk):
                yield event.name, event.data


def _whole(url: str, body: dict[str, object]) -> Iterator[str]:
    ends = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            response = httpx.post(f"{url}/complete", json={**body, "stream": False}, timeout=180)
            if response.status_code < 500 or time.monotonic() > ends:
                yield response.raise_for_status().json()["choices"][0]["text"]
                return
        except httpx.TransportError:
            if time.monotonic() > ends:
                raise
        time.sleep(0.2)
