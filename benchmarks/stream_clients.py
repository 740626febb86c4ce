"""Low-overhead stream clients: they keep N streams busy and count tokens in the raw bytes, without parsing events."""

from __future__ import annotations

import asyncio
import json
import time
from enum import Enum
from typing import cast

from benchmarks.prompts import pseudo_prose

_PROMPT_WORDS = 48
_LAST_CHUNK = b"0\r\n\r\n"


class Endpoint(Enum):
    """The completion endpoint under load."""

    COMPLETE = "complete"
    OPENAI = "openai"

    @property
    def path(self) -> str:
        """The path of the requests."""
        return "/complete" if self is Endpoint.COMPLETE else "/v1/completions"

    @property
    def token_marker(self) -> bytes:
        """Bytes that occur exactly once in each token's event, and nowhere else."""
        return b"event: token\n" if self is Endpoint.COMPLETE else b'"finish_reason": null'

    @property
    def end_marker(self) -> bytes:
        """The start of the last event of a complete stream."""
        return b"event: done\n" if self is Endpoint.COMPLETE else b"data: [DONE]\n"


class StreamClients:
    """All clients of one measurement, and their counters; owned by the event loop."""

    def __init__(self, endpoint: Endpoint, port: int, tokens: int) -> None:
        self.endpoint = endpoint
        self.failure = ""
        self._port = port
        self._tokens = tokens
        self._n_requests = 0
        self._clients: list[_Client] = []
        self.reset_counts()

    def reset_counts(self) -> None:
        """Discards what was counted during the warm-up."""
        self.n_tokens = 0
        self.first_tokens: list[float] = []
        """Seconds from a request to its first token."""
        self.gaps: list[float] = []
        """Seconds between two reads of a stream that brought tokens."""

    async def open(self, streams: int) -> None:
        """Connects `streams` clients; each sends its next request as soon as the last one is complete."""
        loop = asyncio.get_running_loop()
        for _ in range(streams):
            _, client = await loop.create_connection(lambda: _Client(self), "127.0.0.1", self._port)
            self._clients.append(client)

    def close(self) -> None:
        """Aborts all connections."""
        for client in self._clients:
            client.abort()

    def next_request(self) -> bytes:
        """A request with a prompt of its own."""
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
        head = f"POST {self.endpoint.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class _Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clients: StreamClients) -> None:
        self._shared = clients
        self._transport: asyncio.Transport | None = None
        self._sent_at = self._last_token_at = 0.0
        self._n_tokens = 0
        self._previous_data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it
        self._send()

    def data_received(self, data: bytes) -> None:
        count = data.count(self._shared.endpoint.token_marker)
        if count:
            now = time.perf_counter()
            times = self._shared.gaps if self._n_tokens else self._shared.first_tokens
            times.append(now - (self._last_token_at or self._sent_at))
            self._last_token_at = now
            self._n_tokens += count
            self._shared.n_tokens += count
        if data.endswith(_LAST_CHUNK):
            if self._shared.endpoint.end_marker not in self._previous_data + data:
                self._shared.failure = f"a stream ended early: {(self._previous_data + data)[-300:]!r}"
                return
            self._send()
        else:
            self._previous_data = data

    def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def _send(self) -> None:
        assert self._transport is not None
        self._n_tokens, self._last_token_at, self._sent_at = 0, 0.0, time.perf_counter()
        self._transport.write(self._shared.next_request())
