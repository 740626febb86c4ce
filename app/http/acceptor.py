"""Accepts connections, as many at a time as the share of best-effort work allows."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from app.http.best_effort import BestEffortTurns

_PER_TURN = 16
"""Connections accepted in one iteration of the event loop."""
_DISCARD_SECONDS = 0.00003
"""Time for a connection that its client has closed. A queue of them must not delay others for long."""
_PAUSE_SECONDS = 0.1
"""Until the next try when the system has no file descriptors or memory for another connection."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """A listening socket. New connections wait in the kernel's backlog until their turn.

    An event loop's own server accepts whatever arrives, so a client that connects without end takes most of its time.
    """

    def __init__(
        self, sock: socket.socket, backlog: int, protocol: Callable[[], asyncio.Protocol], best_effort: BestEffortTurns
    ) -> None:
        self._socket, self._protocol, self._best_effort = sock, protocol, best_effort
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        self._is_closed = self._is_paused = False
        sock.setblocking(False)
        sock.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Stops listening; open connections stay."""
        self._is_closed = True
        self._loop.remove_reader(self._socket)
        self._socket.close()

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
            if not self._accept():
                return

    def _on_turn(self) -> None:
        if not self._is_closed:
            self._accept()
            self._resume()

    def _accept(self) -> bool:
        """Accepts the next connection whose client is still there; returns whether there may be more."""
        for _attempt in range(_PER_TURN):
            try:
                connection, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    continue  # the client has gone already
                self._pause()
                return False
            if _prepare(connection):
                opening = self._loop.create_task(self._open(connection))
                self._opening.add(opening)
                opening.add_done_callback(self._opening.discard)
                return True
            connection.close()
            self._best_effort.charge(_DISCARD_SECONDS)
        return True

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:  # the client has gone already
            connection.close()


def _prepare(connection: socket.socket) -> bool:
    """Sets options; returns whether the client is still there, or has sent something."""
    connection.setblocking(False)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False
