"""A request and the parts of its answer as plain data, as they go between a front and its replicas. No HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Protocol

Headers = tuple[tuple[bytes, bytes], ...]


class ReplicaLost(Exception):
    """Whoever had the request is gone, and its answer with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request, read to its end."""

    request_id: str
    """What the replica calls it. No replica gets the same one twice: it may still be at work for whoever has left."""
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes

    def with_body(self, body: bytes) -> Call:
        """The same request with another body."""
        others = tuple(header for header in self.headers if header[0] != b"content-length")
        return replace(self, body=body, headers=(*others, (b"content-length", str(len(body)).encode())))

    def header(self, name: bytes) -> str | None:
        """The first header of this name, in small letters."""
        return _first(self.headers, name)


@dataclass(frozen=True, slots=True)
class Taken:
    """A replica has the request; nothing of an answer yet."""

    replica: str


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of the answer."""

    status: int
    headers: Headers

    @property
    def is_event_stream(self) -> bool:
        """Whether its body comes bit by bit."""
        return (self.header(b"content-type") or "").startswith("text/event-stream")

    def header(self, name: bytes) -> str | None:
        """The first header of this name, in small letters."""
        return _first(self.headers, name)


@dataclass(frozen=True, slots=True)
class Whole:
    """One replica's whole answer."""

    replica: str
    head: Head
    body: bytes


Part = Taken | Head | bytes


def _first(headers: Headers, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


class Replicas(Protocol):
    """Those that can answer, whoever they are and however they are reached."""

    def ask(self, call: Call) -> AsyncGenerator[Part, None]:
        """One of them answers: Taken, Head, then the body. Raises ReplicaLost; closed early, the client has left."""
        ...

    async def ask_all(self, call: Call) -> list[asyncio.Task[Whole]]:
        """The answer of each, which may be long in coming. Raises ReplicaLost; cancelled, nobody wants it."""
        ...
