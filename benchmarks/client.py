"""Load generator: HTTP/1.1 clients that keep a number of streams or a rate and record when tokens arrive.

It shares the cores with the server under test, so the path of a token is short: llhttp removes the framing, and events
of tokens are counted, not parsed. benchmarks/completions.py parses a response once it is complete.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import monotonic as now
from typing import cast
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of a server. `base` is the path prefix of every route, without a trailing slash."""

    host: str
    port: int
    tls: bool = False
    base: str = ""
    key: str = field(default="", repr=False)
    """API key; sent as Authorization unless empty."""

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def request(self, method: str, path: str, body: bytes = b"", headers: Iterable[tuple[str, str]] = ()) -> bytes:
        """The bytes of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*"]
        lines += [f"Authorization: Bearer {self.key}"] * bool(self.key) + [f"{name}: {text}" for name, text in headers]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode("ascii") + body


def parse_address(url: str) -> Address:
    """Raises ValueError with a message for the user."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"the URL must look like http://127.0.0.1:8000, not {url!r}")
    if parts.username or parts.query or parts.fragment or any(c.isspace() or not c.isascii() for c in url):
        raise ValueError(f"the URL must hold a scheme, a host, a port and a path only, not {url!r}")
    tls = parts.scheme == "https"
    return Address(host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls, base=parts.path.rstrip("/"))


class Exchange:
    """A request, and the received part of its response. Times are monotonic seconds."""

    __slots__ = (
        *("wire", "marker", "parser", "sent", "status", "headers", "first_byte", "arrivals", "ended", "error"),
        *("keeps_connection", "on_end", "_pieces"),
    )

    def __init__(self, wire: bytes, marker: bytes = b"event: token\n") -> None:
        """`marker` occurs exactly once in each token's event, and nowhere else."""
        self.wire = wire
        self.marker = marker
        self.sent = now()
        self.on_end: Callable[[], None] = lambda: None
        self.reset()

    def reset(self) -> None:
        """Discards the response, so that the request can be sent again."""
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        """0 until the head of the answer has arrived."""
        self.headers: dict[str, str] = {}
        self.first_byte: float | None = None
        self.arrivals: list[float] = []
        """When each token's event arrived."""
        self.keeps_connection = False
        """Whether the server lets the connection be used again."""
        self.ended: float | None = None
        self.error = ""
        """Why there is no complete answer."""
        self._pieces: list[bytes] = []

    @property
    def body(self) -> bytes:
        """The body so far, without its framing."""
        self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]

    def end(self, error: str = "") -> None:
        """Ends it once."""
        if self.ended is None:
            self.ended, self.error = now(), error
            self.on_end()

    def on_message_begin(self) -> None:
        """Called by the parser, as are the methods below."""
        if self.ended:
            raise ValueError("there are bytes after the end of the answer")
        self.first_byte = now()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self._pieces.append(piece)
        if piece.count(self.marker) == 1:
            self.arrivals.append(now())
        else:  # none or several; a marker may also be split between two pieces
            self.arrivals += [now()] * (self.body.count(self.marker) - len(self.arrivals))

    def on_message_complete(self) -> None:
        self.keeps_connection = self.parser.should_keep_alive()
        self.end()


class Client(asyncio.Protocol):
    """One keep-alive connection with one exchange at a time. `close` never waits."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None

    @property
    def is_open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None

    async def open(self) -> bool:
        """Connects unless the connection is open. Returns whether it connected. Raises OSError."""
        if self.is_open:
            return False
        address, loop = self.address, asyncio.get_running_loop()
        await loop.create_connection(lambda: self, address.host, address.port, ssl=address.tls or None)
        return True

    def send(self, exchange: Exchange) -> None:
        """Sends a request on the open connection; calls `exchange.on_end` when its response has ended."""
        assert self._transport
        self._exchange = exchange
        exchange.sent = now()
        self._transport.write(exchange.wire)

    async def run(self, exchange: Exchange) -> Exchange:
        """Sends a request and waits for its end; sends it again if the server closed a used connection unanswered.

        llama-server announces keep-alive but closes after each stream.
        """
        while True:
            try:
                is_new = await self.open()
            except OSError as error:
                exchange.end("connection refused" if isinstance(error, ConnectionRefusedError) else str(error))
                return exchange
            ended = asyncio.get_running_loop().create_future()
            exchange.on_end = partial(_set_result, ended)
            self.send(exchange)
            await ended
            if is_new or exchange.first_byte is not None:
                return exchange
            exchange.reset()

    def close(self) -> None:
        """Aborts the connection."""
        if self._transport:
            self._transport.abort()
        self._transport = self._exchange = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop, as are the methods below."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from it

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.close()
            return
        try:
            exchange.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.close()
            exchange.end(
                f"the answer breaks HTTP: {error}" if exchange.status else "the answer does not begin like HTTP"
            )
        if exchange.ended and not exchange.keeps_connection:
            self.close()

    def connection_lost(self, _: Exception | None) -> None:
        exchange, self._exchange, self._transport = self._exchange, None, None
        if exchange is None:
            return
        if exchange.status and not exchange.headers.keys() & {"content-length", "transfer-encoding"}:
            exchange.end()  # a body without a length lasts until its connection closes
        else:
            exchange.end(f"the connection closed {'in mid-response' if exchange.first_byte else 'before the answer'}")


def _set_result(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def keep_busy(
    address: Address, streams: int, exchanges: Iterator[Exchange], on_end: Callable[[Exchange], None]
) -> None:
    """Closed loop: `streams` connections, each of which sends its next request as soon as the last one has ended."""

    async def stream() -> None:
        client = Client(address)
        try:
            for exchange in exchanges:
                on_end(await client.run(exchange))
        finally:
            client.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())


async def keep_rate(
    address: Address, gaps: Iterator[float], exchanges: Iterator[Exchange], on_end: Callable[[Exchange], None]
) -> None:
    """Open loop: the next exchange starts `gaps` seconds after the last one was due, on an idle or a new connection.

    `exchange.sent` becomes the time when it was due: if this process is late, the server's clients have waited.
    """
    clients, idle, due = list[Client](), list[Client](), now()

    async def send(exchange: Exchange, due: float) -> None:
        if not idle:
            clients.append(Client(address))
            idle.append(clients[-1])
        client = idle.pop()
        await client.run(exchange)
        idle.append(client)
        exchange.sent = due
        on_end(exchange)

    try:
        async with asyncio.TaskGroup() as group:
            for gap in gaps:
                due += gap
                await asyncio.sleep(max(0.0, due - now()))
                if (exchange := next(exchanges, None)) is None:
                    break
                group.create_task(send(exchange, due))
    finally:
        for client in clients:
            client.close()


async def exchange_alone(address: Address, exchange: Exchange) -> Exchange:
    """One exchange on a connection of its own."""
    client = Client(address)
    try:
        return await client.run(exchange)
    finally:
        client.close()
