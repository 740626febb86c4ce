"""Incremental decoder of HTTP/1.1 response bodies.

Three framings, one face: `feed` takes what the socket gave and returns the decoded bytes that are whole by now,
Call `finish` when the peer closes; `done` is true once the body has ended.
"""

from __future__ import annotations

from typing import Protocol


class ProtocolError(Exception):
    """The peer broke HTTP/1.1, or hung up before its answer was whole."""


class Body(Protocol):
    """Mutable, owned by one response."""

    done: bool

    def feed(self, data: bytes) -> bytes: ...
    def finish(self) -> None: ...


class ChunkedBody:
    """Transfer-Encoding: chunked (RFC 9112, section 7.1). A chunk comes out when all of it is there."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        self._rest += data
        pieces: list[bytes] = []
        while not self.done and (piece := self._take()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    def finish(self) -> None:
        if not self.done:
            raise ProtocolError("the connection closed in mid-response")

    def _take(self) -> bytes | None:
        line_end = self._rest.find(b"\r\n")
        if line_end < 0:
            return None
        size = _chunk_size(self._rest[:line_end])
        if size == 0:
            return self._end(line_end)
        start, stop = line_end + 2, line_end + 2 + size
        if len(self._rest) < stop + 2:
            return None
        if self._rest[stop : stop + 2] != b"\r\n":
            raise ProtocolError("a chunk is longer than its stated size")
        piece, self._rest = self._rest[start:stop], self._rest[stop + 2 :]
        return piece

    def _end(self, line_end: int) -> bytes | None:
        """The last chunk: trailers, if any, up to the empty line."""
        end = self._rest.find(b"\r\n\r\n", line_end)
        if end < 0:
            return None
        if len(self._rest) > end + 4:
            raise ProtocolError("there are bytes after the end of the response")
        self.done = True
        return b""


class LengthBody:
    """Content-Length."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        if len(data) > self._left:
            raise ProtocolError("there are bytes after the end of the response")
        self._left -= len(data)
        self.done = self._left == 0
        return data

    def finish(self) -> None:
        if not self.done:
            raise ProtocolError("the connection closed in mid-response")


class UntilCloseBody:
    """Neither header: the body lasts until the peer closes."""

    def __init__(self) -> None:
        self.done = False

    def feed(self, data: bytes) -> bytes:
        return data

    def finish(self) -> None:
        self.done = True


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or digits.strip(b"0123456789abcdefABCDEF"):
        raise ProtocolError("a chunk does not begin with its size")
    return int(digits, 16)
