"""Connections that have been accepted, and wait for a turn before they get a protocol and are read.

The service accepts all connections soon, because that costs it less than opening them. It opens those that wait in
turns, in which addresses alternate, so a client that connects without end mostly delays itself. The service opens a
connection at once when its first packet has a known API key.
"""

from __future__ import annotations

import asyncio
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from app.access.owner_shares import EntryCounts
from app.http.connection_limits import ConnectionLimits

_LEAST_CAPACITY = 32
"""Connections in the lobby while all others are taken; ensure_file_limit() reserves their file descriptors."""
_PEEKED_BYTES = 8192
"""Of the first packet, in which a key is looked for."""
_DISCARD_SECONDS = 0.00003
"""Time of the event loop for closing a connection unopened."""
_Open = Callable[[socket.socket], None]


class Lobby:
    """Owned by the event loop; see the module."""

    def __init__(self, open_connection: _Open, limits: ConnectionLimits) -> None:
        self._open, self._limits, self._best_effort = open_connection, limits, limits.best_effort
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, OrderedDict[socket.socket, Callable[[], None]]] = {}
        """By address, the oldest first, each with the callback that waits for its turn."""
        self._counts = EntryCounts[str]()
        self.count = 0
        """Connections that wait."""

    def add(self, connection: socket.socket, address: str, *, must_wait: bool) -> None:
        """Opens the connection, now with a known key or unless it must wait; closes it if its client has left.

        When the lobby and the open connections take all that the service may have, the address with the most
        connections in the lobby loses its oldest one.
        """
        if (first := _peek(connection)) is None:
            self._discard(connection)
        elif not must_wait or self._limits.has_known_key(first):
            self._open(connection)
        else:
            self._wait(connection, address)

    def close(self) -> None:
        """Closes all connections that wait."""
        for address in tuple(self._waiting):
            for connection in tuple(self._waiting[address]):
                self._remove(connection, address)
                connection.close()

    def _wait(self, connection: socket.socket, address: str) -> None:
        if self.count >= max(_LEAST_CAPACITY, self._limits.limits.connections - self._limits.count):
            # Not the newest, whose key may be on its way.
            crowded = self._counts.largest
            assert crowded is not None
            oldest = next(iter(self._waiting[crowded]))
            self._remove(oldest, crowded)
            self._discard(oldest)
            self._limits.cut_by_reason["address"] += 1
        on_turn = partial(self._on_turn, connection, address)
        self._waiting.setdefault(address, OrderedDict())[connection] = on_turn
        self.count += 1
        self._counts.add(address)
        self._best_effort.request(address, on_turn)
        self._loop.add_reader(connection, self._on_packet, connection, address)

    def _on_packet(self, connection: socket.socket, address: str) -> None:
        self._loop.remove_reader(connection)
        if (first := _peek(connection)) is None:
            self._remove(connection, address)
            self._discard(connection)
        elif self._limits.has_known_key(first):
            self._remove(connection, address)
            self._open(connection)

    def _on_turn(self, connection: socket.socket, address: str) -> None:
        self._remove(connection, address)
        if _peek(connection) is None:
            self._discard(connection)
        else:
            self._open(connection)

    def _remove(self, connection: socket.socket, address: str) -> None:
        queue = self._waiting[address]
        self._best_effort.cancel(address, queue.pop(connection))
        if not queue:
            del self._waiting[address]
        self.count -= 1
        self._counts.remove(address)
        self._loop.remove_reader(connection)

    def _discard(self, connection: socket.socket) -> None:
        connection.close()
        self._best_effort.charge(_DISCARD_SECONDS)


def _peek(connection: socket.socket) -> bytes | None:
    """What the client has sent, which stays there to be read; None if it has left without a word."""
    try:
        return connection.recv(_PEEKED_BYTES, socket.MSG_PEEK) or None
    except BlockingIOError:
        return b""
    except OSError:
        return None
