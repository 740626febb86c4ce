"""Accepts connections, as many at a time as the share of best-effort work allows."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import select
import socket
import time
from collections.abc import Callable

from app.http.connection_limits import ConnectionLimits
from app.http.lobby import Lobby

_PER_TURN = 16
"""Connections accepted in one iteration of the event loop, or in one turn."""
_PAUSE_SECONDS = 0.1
"""Until the next try when the system has no file descriptors or memory for another connection."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """A listening socket. New connections wait in the kernel's backlog until they are accepted, then in the lobby.

    An event loop's own server accepts whatever arrives, so a client that connects without end takes most of its time.
    """

    def __init__(
        self, sock: socket.socket, backlog: int, protocol: Callable[[], asyncio.Protocol], limits: ConnectionLimits
    ) -> None:
        self._socket, self._protocol, self._best_effort = sock, protocol, limits.best_effort
        self._loop = asyncio.get_running_loop()
        self._lobby = Lobby(self._begin_opening, limits)
        self._opening: set[asyncio.Task[object]] = set()
        self._is_closed = self._is_paused = False
        sock.setblocking(False)
        sock.listen(backlog)
        self._backlog = select.poll()
        self._backlog.register(sock, select.POLLIN)
        self._resume()

    @property
    def has_work(self) -> bool:
        """Whether connections wait to be accepted or opened."""
        return bool(self._opening or self._lobby.count or self._backlog.poll(0))

    def close(self) -> None:
        """Stops listening, and closes the connections that wait in the lobby; open ones stay."""
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self._lobby.close()

    def _resume(self) -> None:
        if not self._is_closed and not self._is_paused:
            self._loop.add_reader(self._socket, self._on_readable)

    def _pause(self) -> None:
        """Accepts nothing for a while. A flag ends it, not the clock: uvloop calls timers up to 1 ms early."""
        self._is_paused = True
        self._loop.remove_reader(self._socket)
        self._loop.call_later(_PAUSE_SECONDS, self._end_pause)

    def _end_pause(self) -> None:
        self._is_paused = False
        self._resume()

    def _on_readable(self) -> None:
        for _ in range(_PER_TURN):
            if self._best_effort.is_exhausted:
                self._loop.remove_reader(self._socket)
                self._best_effort.request("", self._on_turn)  # as if all new connections had one address
                return
            if not self._accept(must_wait=False):
                return

    def _on_turn(self) -> None:
        if self._is_closed:
            return
        started = time.perf_counter()
        for _ in range(_PER_TURN):
            if not self._accept(must_wait=True):  # this turn is not theirs
                break
        self._best_effort.charge(time.perf_counter() - started)
        self._resume()

    def _accept(self, *, must_wait: bool) -> bool:
        """Accepts the next connection; returns whether there may be more."""
        try:
            connection, address = self._socket.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self._pause()
                return False
            return True  # the client has gone already
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # the client has gone already, or it is no TCP socket
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lobby.add(connection, address[0] if isinstance(address, tuple) else "", must_wait=must_wait)
        return True

    def _begin_opening(self, connection: socket.socket) -> None:
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client has gone already
            connection.close()
