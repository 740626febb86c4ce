"""Responses over TCP from a replica to its gateway, because a cluster's own messages cost a millisecond of CPU each.

The gateway sends a request through the cluster, whose scheduler chooses a replica and counts the request until its end.
The replica answers with an offer: its address and a ticket for one connection. On it the response comes as frames:

    kind (1 byte)  length (4 bytes, big-endian)  payload
    H  head: JSON [status, [[name, value], ...]]     B  part of the body     E  end, without payload

A connection that closes before E means that the replica is lost; the gateway closing it is a client disconnect.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp

from app.cluster.asgi_adapter import stream_response
from app.cluster.messages import Accepted, Call, Head, Offer, ReplicaLost

_HEADER = struct.Struct(">cI")
_TICKET_BYTES = 32
_CONNECT_SECONDS = 5.0
_READ_BYTES = 1 << 16


class ResponseServer:
    """Serves the responses of one replica's application; owned by the replica's event loop."""

    def __init__(self, app: ASGIApp, replica: str) -> None:
        self._app, self._replica = app, replica
        self._offered: dict[str, tuple[Call, asyncio.Event]] = {}
        """By ticket: requests whose response has not been fetched yet, and what tells that it was."""

    async def start(self, host: str) -> None:
        """Listens on a free port of this address."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        self._address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]

    def stop(self) -> None:
        """Stops listening; open connections end with their responses."""
        self._server.close()

    async def answer(self, call: Call) -> AsyncGenerator[Accepted, None]:
        """Accepts a request and offers its response; ends when the connection for it has closed."""
        ticket, has_ended = secrets.token_hex(_TICKET_BYTES // 2), asyncio.Event()
        self._offered[ticket] = call, has_ended
        try:
            yield Accepted(self._replica, Offer(*self._address, ticket))
            await has_ended.wait()
        finally:
            self._offered.pop(ticket, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offered = None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                ticket = await reader.readexactly(_TICKET_BYTES)
            if offered := self._offered.pop(ticket.decode("latin-1"), None):
                await _until_closed(reader, self._write(offered[0], writer))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            if offered:
                offered[1].set()

    async def _write(self, call: Call, writer: asyncio.StreamWriter) -> None:
        async with aclosing(stream_response(self._app, call, self._replica)) as parts:
            async for part in parts:
                if isinstance(part, Head):
                    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in part.headers]
                    writer.write(_frame(b"H", json.dumps([part.status, headers]).encode("ascii")))
                elif isinstance(part, bytes):
                    writer.write(_frame(b"B", part))
                await writer.drain()
        writer.write(_frame(b"E", b""))
        await writer.drain()


async def fetch(offer: Offer, loss: asyncio.Future[Any]) -> AsyncGenerator[Head | bytes, None]:
    """Yields the head and the body of the response. Closing it early is a client disconnect. Raises ReplicaLost.

    loss: raises when the cluster learns that the replica is lost, which a connection to a dead machine does not.
    """
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(offer.host, offer.port)
    except (OSError, TimeoutError):
        raise ReplicaLost from None

    def abort_if_lost(_: object) -> None:
        if loss.cancelled() or loss.exception():
            writer.transport.abort()

    loss.add_done_callback(abort_if_lost)
    try:
        writer.write(offer.ticket.encode("ascii"))
        rest, is_complete = b"", False
        while not is_complete:
            if not (data := await reader.read(_READ_BYTES)):
                raise ReplicaLost
            parts, rest, is_complete = _parse(rest + data)
            for part in parts:
                yield part
    except OSError:
        raise ReplicaLost from None
    finally:
        loss.remove_done_callback(abort_if_lost)
        writer.close()


def _frame(kind: bytes, payload: bytes) -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


def _parse(data: bytes) -> tuple[list[Head | bytes], bytes, bool]:
    """The complete frames with the parts of the body joined, the incomplete rest, and whether the response ended."""
    parts: list[Head | bytes] = []
    body: list[bytes] = []
    position, is_complete = 0, False
    while len(data) - position >= _HEADER.size and not is_complete:
        kind, length = _HEADER.unpack_from(data, position)
        start, end = position + _HEADER.size, position + _HEADER.size + length
        if end > len(data):
            break
        if kind == b"H":
            status, headers = json.loads(data[start:end])
            pairs = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in headers)
            parts.append(Head(status, tuple(pairs)))
        elif kind == b"B":
            body.append(data[start:end])
        position, is_complete = end, kind == b"E"
    if body:
        parts.append(b"".join(body))
    return parts, data[position:], is_complete


async def _until_closed(reader: asyncio.StreamReader, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, and cancels it when the other side closes the connection. Raises what `work` raises."""
    working, reading = asyncio.ensure_future(work), asyncio.ensure_future(reader.read())
    try:
        await asyncio.wait({working, reading}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reading.cancel()
        if not working.done():
            working.cancel()
        results = await asyncio.gather(working, reading, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]
