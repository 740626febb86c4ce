"""Concurrent clients of the service on Ray, and how each of their responses ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

    def read(self, http: httpx.Client) -> None:
        """Reads the response to its end."""
        body = {**BODY, "seed": self.seed}
        try:
            for piece in _PIECES[self.kind](http, body):
                self.text += piece
            self.end = "done"
        except (httpx.HTTPError, OSError, RuntimeError, ValueError, KeyError) as error:
            self.end = repr(error)


class Clients:
    """Runs clients concurrently, each in a thread of its own. They share what takes long to make: a TLS context."""

    def __init__(self, url: str, clients: Sequence[Client]) -> None:
        self.clients = clients
        http = httpx.Client(base_url=url, timeout=180, limits=httpx.Limits())
        self._threads = [threading.Thread(target=client.read, args=[http], daemon=True) for client in clients]
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


def _resuming(http: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    return completion(str(http.base_url).rstrip("/"), body)


def _plain(http: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    for name, data in _events(http, "/complete", body):
        if name == "token":
            yield json.loads(data)["text"]
        elif name == "error":
            raise RuntimeError(data.decode())
        elif name == "done":
            return
    raise RuntimeError("the stream was cut")


def _v1(http: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    for name, data in _events(http, "/v1/completions", {**body, "stream": True}):
        if data == b"[DONE]":
            return
        if name:  # else a heartbeat
            yield json.loads(data)["choices"][0]["text"]
    raise RuntimeError("the stream was cut")


def _events(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    parser = EventParser()
    with http.stream("POST", path, json=body) as response:
        response.raise_for_status()
        for chunk in response.iter_bytes():
            for event in parser.feed(chunk):
                yield event.name, event.data


def _whole(http: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    ends = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            response = http.post("/complete", json={**body, "stream": False})
            if response.status_code < 500 or time.monotonic() > ends:
                yield response.raise_for_status().json()["choices"][0]["text"]
                return
        except httpx.TransportError:
            if time.monotonic() > ends:
                raise
        time.sleep(0.2)


_PIECES: Mapping[str, Callable[[httpx.Client, dict[str, Any]], Iterator[str]]] = {
    "resuming": _resuming,
    "plain": _plain,
    "v1": _v1,
    "whole": _whole,
}
"""Kind of client -> the pieces of its text."""
