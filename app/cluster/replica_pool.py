"""The gateway's connections to its replicas, and the choice of a replica for each request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from typing import cast

import msgspec

from app.cluster.messages import (
    ACCEPTED,
    BODY,
    CALL,
    END,
    HEAD,
    REFUSED,
    Address,
    BodyConsumer,
    Call,
    FullResponse,
    Head,
    ReplicaLost,
    frame,
    split_frames,
)

_ACCEPT_SECONDS = 5.0
"""A replica that has not accepted a request by then is passed over."""
_AVOID_SECONDS = 5.0
"""For so long after it refused or did not accept a request, a replica gets no other."""
_SLOW_SECONDS = 1.0
"""A replica from which a client turns away after so long counts as one that did not accept."""
_MAX_UNREAD_BYTES = 1 << 16
"""More of a response that is not taken stops the replica's sending."""
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 5,
    socket.TCP_KEEPINTVL: 3,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 14_000,
}
"""A machine that lost its power or its network closes no connection: the system finds it after 14 s."""


class _Connection(asyncio.Protocol):
    """Carries one request at a time."""

    def __init__(self) -> None:
        self._frames: list[tuple[bytes, bytes]] = []
        self._rest = b""
        self._n_unread = 0
        """Bytes of `_frames`."""
        self._consume: BodyConsumer | None = None
        """While read_body() waits."""
        self._is_lost = False
        self._changed = asyncio.Event()
        self.is_complete = False
        """Whether the response has ended, so that another request may follow."""

    @classmethod
    async def open(cls, address: Address) -> _Connection:
        """Raises OSError."""
        transport, connection = await asyncio.get_running_loop().create_connection(cls, address.host, address.port)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
        transport.write(address.secret)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's callback."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """asyncio's callback; also at the end of what the replica sends."""
        self._is_lost = True
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        """asyncio's callback."""
        frames, self._rest = split_frames(self._rest + data if self._rest else data)
        if self._consume and not self._frames and all(kind == BODY for kind, _ in frames):
            body = frames[0][1] if len(frames) == 1 else b"".join([payload for _, payload in frames])
            if not body or self._consume(body):
                return
        self._frames += frames
        self._n_unread += len(data)
        if self._n_unread > _MAX_UNREAD_BYTES:
            self._transport.pause_reading()
        self._changed.set()

    @property
    def is_usable(self) -> bool:
        """Whether the replica has not closed it, as far as is known."""
        return not (self._is_lost or self._transport.is_closing())

    async def request(self, call: Call) -> bool:
        """Sends a request; False if the replica refuses it. Raises ReplicaLost."""
        self.is_complete = False
        self._transport.write(frame(CALL, msgspec.msgpack.encode(call)))
        kind, _ = await self._next_frame()
        assert kind in (ACCEPTED, REFUSED), kind
        self.is_complete = kind == REFUSED
        return kind == ACCEPTED

    async def read_head(self) -> Head:
        """Raises ReplicaLost, also if the application ended without a response."""
        kind, payload = await self._next_frame()
        if kind != HEAD:
            raise ReplicaLost
        return msgspec.msgpack.decode(payload, type=Head)

    async def read_body(self, consume: BodyConsumer | None) -> bytes:
        """The part of the body that has arrived; empty at its end, or after a part of a frame. Raises ReplicaLost.

        consume: may take parts that arrive meanwhile.
        """
        if not self._frames:
            self._read_on()  # a part of a frame may have stopped it
            self._consume = consume
            try:
                await self._wait()
            finally:
                self._consume = None
        frames, self._frames = self._frames, []
        self._read_on()
        self.is_complete = bool(frames) and frames[-1][0] == END
        return b"".join([payload for _, payload in frames])

    async def _next_frame(self) -> tuple[bytes, bytes]:
        while not self._frames:
            await self._wait()
        return self._frames.pop(0)

    def _read_on(self) -> None:
        if self._n_unread > _MAX_UNREAD_BYTES and not self._is_lost:
            self._transport.resume_reading()
        self._n_unread = 0

    async def _wait(self) -> None:
        """Waits for frames, or a part of one. Raises ReplicaLost."""
        if self._is_lost:
            raise ReplicaLost
        self._changed.clear()
        await self._changed.wait()
        if self._is_lost and not self._frames:
            raise ReplicaLost

    def close(self) -> None:
        """A client disconnect, if the response has not ended."""
        self._transport.close()


class _Replica:
    """The gateway's state of a replica."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.n_open = 0
        """This gateway's requests on it."""
        self.last_chosen = 0.0
        self.avoid_until = 0.0
        self._idle: list[_Connection] = []
        self._is_closed = False

    async def start(self, call: Call) -> ReplicaResponse | None:
        """Sends a request; None if the replica does not accept it. Raises ReplicaLost."""
        connection, is_accepted, began = None, False, time.monotonic()
        self.n_open += 1
        is_avoided = True
        try:
            async with asyncio.timeout(_ACCEPT_SECONDS):
                connection = self._take_idle() or await _Connection.open(self.address)
                is_accepted = await connection.request(call)
        except (OSError, TimeoutError):
            pass
        except asyncio.CancelledError:  # the client left early: that says nothing of the replica
            is_avoided = time.monotonic() - began > _SLOW_SECONDS
            raise
        finally:
            if not is_accepted:
                self.release(connection)
                if is_avoided:
                    self.avoid_until = time.monotonic() + _AVOID_SECONDS
        return ReplicaResponse(self, connection) if connection and is_accepted else None

    def release(self, connection: _Connection | None) -> None:
        """Ends a request; the connection is kept if the response is complete, and closed otherwise."""
        self.n_open -= 1
        if connection and connection.is_complete and not self._is_closed:
            self._idle.append(connection)
        elif connection:
            connection.close()

    def close(self) -> None:
        """Open responses go on."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close()
        return None

    async def full_response(self, call: Call) -> FullResponse:
        """The whole response. Raises ReplicaLost, too, if the replica does not accept the request."""
        if not (response := await self.start(call)):
            raise ReplicaLost
        try:
            return FullResponse(self.address.replica, await response.read_head(), await response.body())
        finally:
            response.close()


class ReplicaResponse:
    """The response to an accepted request. Its owner must call close(), which also stops the replica."""

    head: Head
    """Set by read_head()."""

    def __init__(self, replica: _Replica, connection: _Connection) -> None:
        self.replica = replica.address.replica
        """Its name."""
        self.consume: BodyConsumer | None = None
        """May take parts of the body while next() waits, which waking its caller would cost more than."""
        self._replica, self._connection = replica, connection
        self._is_closed = False

    async def read_head(self) -> Head:
        """Waits for status and headers; call it first. Raises ReplicaLost."""
        self.head = await self._connection.read_head()
        return self.head

    async def next(self) -> bytes | None:
        """The next part of the body; None after the last. Raises ReplicaLost."""
        while not (self._is_closed or self._connection.is_complete):
            if body := await self._connection.read_body(self.consume):
                return body
        return None

    async def body(self) -> bytes:
        """The rest of the body. Raises ReplicaLost."""
        parts = []
        while (part := await self.next()) is not None:
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        """Discards the rest of the response; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._replica.release(self._connection)


class ReplicaPool:
    """The replicas that a gateway was given; owned by its event loop."""

    def __init__(self) -> None:
        self._replicas: dict[Address, _Replica] = {}
        self._changed = asyncio.Event()

    def update(self, addresses: Collection[Address]) -> None:
        """Replaces the replicas that get new requests. Open responses of others go on."""
        for address in self._replicas.keys() - addresses:
            self._replicas.pop(address).close()
        for address in addresses:
            if address not in self._replicas:
                self._replicas[address] = _Replica(address)
        self._changed.set()

    async def send(self, call: Call) -> ReplicaResponse:
        """Sends the request to the replica with the fewest open ones; to the next one while it is not accepted.

        Raises ReplicaLost.
        """
        while True:
            replica = await self._choose()
            if response := await replica.start(call):
                return response

    def broadcast(self, call: Call) -> list[asyncio.Task[FullResponse]]:
        """Sends the request to all replicas, those included that it avoids otherwise.

        One task per response, which may raise ReplicaLost. Cancel a task to drop it.
        """
        return [asyncio.create_task(replica.full_response(call)) for replica in self._replicas.values()]

    async def _choose(self) -> _Replica:
        """Waits until there is a replica; the caller limits the time."""
        while True:
            now = time.monotonic()
            available = [replica for replica in self._replicas.values() if replica.avoid_until <= now]
            if available:
                chosen = min(available, key=lambda replica: (replica.n_open, replica.last_chosen))
                chosen.last_chosen = now
                return chosen
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await self._changed.wait()
