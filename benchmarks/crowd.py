"""Cheap stream clients: they keep N streams open and count tokens in the raw bytes without parsing the events."""

from __future__ import annotations

import asyncio
import json
import time
from enum import Enum
from typing import cast

from benchmarks.prompts import pseudo_prose

_PROMPT_WORDS = 48
_END = b"0\r\n\r\n"


class Door(Enum):
    """Whose stream is read."""

    COMPLETE = "complete"
    OPENAI = "openai"

    @property
    def path(self) -> str:
        """Where requests go."""
        return "/complete" if self is Door.COMPLETE else "/v1/completions"

    @property
    def mark(self) -> bytes:
        """What stands once in every token's event, and nowhere else."""
        return b"event: token\n" if self is Door.COMPLETE else b'"finish_reason": null'

    @property
    def last(self) -> bytes:
        """What the last event of a text that came to its end begins with."""
        return b"event: done\n" if self is Door.COMPLETE else b"data: [DONE]\n"


class Crowd:
    """All clients of one measurement; owned by the event loop."""

    def __init__(self, door: Door, port: int, tokens: int) -> None:
        self.door = door
        self.failure = ""
        self._port = port
        self._tokens = tokens
        self._n_requests = 0
        self._clients: list[_Client] = []
        self.forget()

    def forget(self) -> None:
        """What was counted so far was the warm-up."""
        self.n_tokens = 0
        self.first_tokens: list[float] = []
        """Seconds from a request to its first token."""
        self.gaps: list[float] = []
        """Seconds between two reads of a stream that brought tokens."""

    async def open(self, streams: int) -> None:
        """Connects that many clients, each of which sends one request after the other."""
        loop = asyncio.get_running_loop()
        for _ in range(streams):
            _, client = await loop.create_connection(lambda: _Client(self), "127.0.0.1", self._port)
            self._clients.append(client)

    def close(self) -> None:
        """Hangs up."""
        for client in self._clients:
            client.hang_up()

    def request(self) -> bytes:
        """The next request: no two are alike."""
        self._n_requests += 1
        body = json.dumps(
            {
                "prompt": pseudo_prose(index=self._n_requests, words=_PROMPT_WORDS, seed=0),
                "max_tokens": self._tokens,
                "ignore_eos": True,
                "stream": True,
                "seed": self._n_requests,
            }
        ).encode()
        head = f"POST {self.door.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._transport: asyncio.Transport | None = None
        self._sent = self._last = 0.0
        self._n_tokens = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self._send()

    def data_received(self, data: bytes) -> None:
        count = data.count(self._crowd.door.mark)
        if count:
            now = time.perf_counter()
            (self._crowd.gaps if self._n_tokens else self._crowd.first_tokens).append(now - (self._last or self._sent))
            self._last = now
            self._n_tokens += count
            self._crowd.n_tokens += count
        if data.endswith(_END):
            if self._crowd.door.last not in self._tail + data:
                self._crowd.failure = f"an answer did not come to its end: {(self._tail + data)[-300:]!r}"
                return
            self._send()
        else:
            self._tail = data

    def hang_up(self) -> None:
        """At once."""
        assert self._transport is not None
        self._transport.abort()

    def _send(self) -> None:
        assert self._transport is not None
        self._n_tokens, self._last, self._sent = 0, 0.0, time.perf_counter()
        self._transport.write(self._crowd.request())
