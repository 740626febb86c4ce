"""Messages between a gateway and its replicas: a request and the parts of its response, and their frames on TCP.

A gateway opens a connection with the replica's secret, and sends one request at a time on it. Each is answered with
REFUSED, because the replica is about to stop, or with ACCEPTED, HEAD, any number of BODY, and END. A frame is

    kind (1 byte)  length (4 bytes, big-endian)  payload

A connection that closes before END means that the replica is lost; the gateway closing it is a client disconnect.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace

Headers = tuple[tuple[bytes, bytes], ...]


class ReplicaLost(Exception):
    """The replica that was processing the request is lost, and its response with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request with its whole body."""

    request_id: str
    """The id on the replica. A retry gets a new one: the replica may still be processing the first try."""
    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes

    def with_body(self, body: bytes) -> Call:
        """A copy of the request with another body."""
        others = tuple(header for header in self.headers if header[0] != b"content-length")
        return replace(self, body=body, headers=(*others, (b"content-length", str(len(body)).encode())))

    def header(self, name: bytes) -> str | None:
        """The first header of this name, which must be in lower case."""
        return _first(self.headers, name)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a replica serves its gateways."""

    replica: str
    host: str
    port: int
    secret: bytes = field(repr=False)
    """SECRET_BYTES long; the replica serves no connection without it."""


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of the response."""

    status: int
    headers: Headers

    @property
    def is_event_stream(self) -> bool:
        """Whether the response's body is streamed."""
        return (self.header(b"content-type") or "").startswith("text/event-stream")

    def header(self, name: bytes) -> str | None:
        """The first header of this name, which must be in lower case."""
        return _first(self.headers, name)


@dataclass(frozen=True, slots=True)
class FullResponse:
    """One replica's whole response."""

    replica: str
    head: Head
    body: bytes


BodyConsumer = Callable[[bytes], bool]
"""Called with a part of the body in the event loop's turn that receives it; returns whether it has taken the part."""


def _first(headers: Headers, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key == name), None)


SECRET_BYTES = 16
CALL, REFUSED, ACCEPTED, HEAD, BODY, END = b"C", b"R", b"A", b"H", b"B", b"E"
"""Kinds of frames. The payload of CALL is a Call and that of HEAD a Head, both in msgpack."""
FRAME_HEADER = struct.Struct(">cI")


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    """One frame."""
    return FRAME_HEADER.pack(kind, len(payload)) + payload


def split_frames(data: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """The kinds and payloads of the complete frames, and the incomplete rest."""
    frames, position = [], 0
    while len(data) - position >= FRAME_HEADER.size:
        kind, length = FRAME_HEADER.unpack_from(data, position)
        start, end = position + FRAME_HEADER.size, position + FRAME_HEADER.size + length
        if end > len(data):
            break
        frames.append((kind, data[start:end]))
        position = end
    return frames, data[position:]
