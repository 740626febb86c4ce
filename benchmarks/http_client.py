"""A minimal HTTP/1.1 client on a raw socket: one keep-alive connection, one request at a time.

It exists because a general client costs a fifth of what is being measured.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.http_body import Body, ChunkedBody, LengthBody, ProtocolError, UntilCloseBody

_READ_SIZE = 65_536


class NoAnswerError(ProtocolError):
    """The connection ended before the first byte of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a server is. `base` is the path in front of every route, without a slash at its end."""

    host: str
    port: int
    tls: bool
    base: str
    key: str = field(default="", repr=False)
    """Sent as Authorization, where there is one."""

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(url: str) -> Address:
    """Raises ValueError with a sentence for the user."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the URL must look like http://127.0.0.1:8000, not {url!r}")
    if parts.username or parts.query or parts.fragment or any(c.isspace() or not c.isascii() for c in url):
        raise ValueError(f"the URL must hold a scheme, a host, a port and a path only, not {url!r}")
    tls = parts.scheme == "https"
    return Address(host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls, base=parts.path.rstrip("/"))


class Response:
    """Mutable, owned by the caller that sent the request; read it to its end before the next one."""

    def __init__(self, *, status: int, keep_alive: bool, body: Body, reader: asyncio.StreamReader) -> None:
        self.status = status
        self._keep_alive = keep_alive
        self._body = body
        self._reader = reader

    @property
    def leaves_connection_usable(self) -> bool:
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
    """Mutable, owned by one stream of the load. `open` before each `request`; closing never waits."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._response: Response | None = None

    async def open(self) -> bool:
        """Connects, unless the connection of the request before is still good; whether it connected."""
        if self._response is not None and not self._response.leaves_connection_usable:
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


def explain(error: Exception) -> str:
    """What went wrong, in words for the user."""
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
        kind = ProtocolError if error.partial else NoAnswerError
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
