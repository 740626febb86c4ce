"""Minimal HTTP/1.1 client on raw sockets: one keep-alive connection, one request at a time.

A general-purpose client would cost a fifth of what is being measured.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

_READ_SIZE = 65_536


class ProtocolError(Exception):
    """The peer violated HTTP/1.1, or closed the connection in mid-response."""


class Body(Protocol):
    """Incremental decoder of one response body.

    `feed` takes bytes from the socket and returns those that are decoded so far. Call `finish` when the peer closes;
    `done` is true once the body has ended.
    """

    done: bool

    def feed(self, data: bytes) -> bytes: ...
    def finish(self) -> None: ...


class ChunkedBody:
    """Transfer-Encoding: chunked (RFC 9112, section 7.1). Returns a chunk once it is complete."""

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
    """A body without either header: it lasts until the peer closes."""

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


class NoResponseError(ProtocolError):
    """The connection ended before the first byte of a response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a server. `base` is the path prefix of every route, without a trailing slash."""

    host: str
    port: int
    tls: bool
    base: str
    key: str = field(default="", repr=False)
    """API key; sent as Authorization unless empty."""

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(url: str) -> Address:
    """Raises ValueError with a message for the user."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the URL must look like http://127.0.0.1:8000, not {url!r}")
    if parts.username or parts.query or parts.fragment or any(c.isspace() or not c.isascii() for c in url):
        raise ValueError(f"the URL must hold a scheme, a host, a port and a path only, not {url!r}")
    tls = parts.scheme == "https"
    return Address(host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls, base=parts.path.rstrip("/"))


class Response:
    """A response, owned by the caller that sent the request; read it to its end before the next request."""

    def __init__(self, *, status: int, keep_alive: bool, body: Body, reader: asyncio.StreamReader) -> None:
        self.status = status
        self._keep_alive = keep_alive
        self._body = body
        self._reader = reader

    @property
    def can_reuse_connection(self) -> bool:
        return self._keep_alive and self._body.done and not self._reader.at_eof()

    async def read(self) -> bytes:
        """The next decoded bytes as they arrive; b"" at the end."""
        while not self._body.done:
            data = await self._reader.read(_READ_SIZE)
            if not data:
                self._body.finish()
            elif piece := self._body.feed(data):
                return piece
        return b""

    async def read_all(self) -> bytes:
        pieces: list[bytes] = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)


class Connection:
    """One keep-alive connection. Call `open` before each `request`; `close` never waits."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._response: Response | None = None

    async def open(self) -> bool:
        """Connects unless the connection of the last request can be reused. Returns whether it connected."""
        if self._response is not None and not self._response.can_reuse_connection:
            self.close()
        if self._streams is None:
            address = self._address
            self._streams = await asyncio.open_connection(address.host, address.port, ssl=address.tls or None)
            return True
        return False

    async def request(self, method: str, path: str, body: bytes = b"") -> Response:
        assert self._streams is not None
        reader, writer = self._streams
        writer.write(_head(self._address, method, path, len(body)) + body)
        await writer.drain()
        self._response = await _read_head(reader)
        return self._response

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
        self._streams = self._response = None


def error_text(error: Exception) -> str:
    """An error as a message for the user."""
    return "connection refused" if isinstance(error, ConnectionRefusedError) else str(error) or type(error).__name__


def _head(address: Address, method: str, path: str, length: int) -> bytes:
    host = f"[{address.host}]" if ":" in address.host else address.host
    authorization = f"Authorization: Bearer {address.key}\r\n" if address.key else ""
    return (
        f"{method} {address.base}{path} HTTP/1.1\r\nHost: {host}:{address.port}\r\nAccept: */*\r\n{authorization}"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode("ascii")


async def _read_head(reader: asyncio.StreamReader) -> Response:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        kind = ProtocolError if error.partial else NoResponseError
        raise kind("the connection closed before the answer") from error
    except asyncio.LimitOverrunError as error:
        raise ProtocolError("the answer does not begin like HTTP") from error
    status_line, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = status_line.partition(" ")
    if version not in ("HTTP/1.1", "HTTP/1.0") or not rest[:3].isdecimal():
        raise ProtocolError("the answer does not begin like HTTP")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    keep_alive = version == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
    return Response(status=int(rest[:3]), keep_alive=keep_alive, body=_framing(headers), reader=reader)


def _framing(headers: dict[str, str]) -> Body:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return ChunkedBody()
    length = headers.get("content-length")
    if length is None:
        return UntilCloseBody()
    if not length.isdecimal():
        raise ProtocolError("Content-Length is not a number")
    return LengthBody(int(length))
