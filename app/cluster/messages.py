"""Messages between a gateway and its replicas: a request and the parts of its response as plain data."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Protocol

Headers = tuple[tuple[bytes, bytes], ...]


class ReplicaLost(Exception):
    """The replica that had the request is lost, and its response with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request with its whole body."""

    request_id: str
    """The id on the replica. Never reused on a replica, which may still be working for a disconnected client."""
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
    """A replica has accepted the request; no response yet."""

    replica: str


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of the response."""

    status: int
    headers: Headers

    @property
    def is_event_stream(self) -> bool:
        """Whether its body is streamed."""
        return (self.header(b"content-type") or "").startswith("text/event-stream")

    def header(self, name: bytes) -> str | None:
        """The first header of this name, in small letters."""
        return _first(self.headers, name)


@dataclass(frozen=True, slots=True)
class Whole:
    """One replica's whole response."""

    replica: str
    head: Head
    body: bytes


Part = Taken | Head | bytes


def _first(headers: Headers, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


class Replicas(Protocol):
    """The replicas behind a gateway, independent of the transport."""

    def ask(self, call: Call) -> AsyncGenerator[Part, None]:
        """Sends the request to one replica; yields Taken, Head, then the body. Closing it early is a disconnect.

        Raises ReplicaLost.
        """
        ...

    async def ask_all(self, call: Call) -> list[asyncio.Task[Whole]]:
        """Broadcasts to all replicas; one task per response, which may raise ReplicaLost. Cancel a task to drop it."""
        ...
