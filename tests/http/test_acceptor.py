"""The listening socket."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from app.http import best_effort
from app.http.acceptor import Acceptor
from app.http.best_effort import CONNECTION_SECONDS, BestEffortTurns
from app.http.connection_limits import ConnectionLimits
from tests.support.async_test import async_test
from tests.support.http.framing_harness import LIMITS


def _limits() -> ConnectionLimits:
    """Limits of a service whose only key is the word key."""
    return ConnectionLimits(replace(LIMITS, connections=40), has_key=lambda head: head == b"key")


class _SocketWithoutDescriptors(socket.socket):
    """A listening socket that can accept nothing."""

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")


@async_test
async def test_without_file_descriptors_the_acceptor_waits_for_one_turn_at_a_time() -> None:
    with _SocketWithoutDescriptors() as listener:
        listener.bind(("127.0.0.1", 0))
        limits = _limits()
        turns = limits.best_effort
        acceptor = Acceptor(listener, 16, asyncio.Protocol, limits)

        def flood() -> None:
            turns.charge(0.0003)
            turns.request("flood", flood)

        with socket.create_connection(listener.getsockname()), turns.paying():
            flood()
            await asyncio.sleep(1.0)
            assert sum(map(len, turns._waiting.values())) <= 2, "the flood's and the acceptor's"
        acceptor.close()


class _SocketLackingDescriptorsAtFirst(socket.socket):
    """A listening socket that can accept nothing until `failures` have been reported."""

    failures = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_the_acceptor_goes_on_once_there_are_descriptors(runner: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """uvloop rounds times to milliseconds, so its timers run up to a millisecond before the time in the clock."""

    async def accept_one() -> None:
        with _SocketLackingDescriptorsAtFirst() as listener:
            listener.bind(("127.0.0.1", 0))
            opened = asyncio.Event()

            def protocol() -> asyncio.Protocol:
                opened.set()
                return asyncio.Protocol()

            acceptor = Acceptor(listener, 16, protocol, _limits())
            with socket.create_connection(listener.getsockname()):
                await asyncio.wait_for(opened.wait(), 5)
            acceptor.close()
            assert listener.failures == 0

    for _ in range(3):
        runner(accept_one())


@async_test
async def test_connections_that_their_clients_have_closed_delay_the_next_one_little() -> None:
    """The 500 took a turn each: a client that connected and closed without end delayed all others by seconds."""
    turns_taken = 0

    def request(address: str, callback: Callable[[], None], *, size: int = 0) -> None:
        nonlocal turns_taken
        turns_taken += 1
        BestEffortTurns.request(turns, address, callback, size=size)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        limits, opened = _limits(), asyncio.Queue[asyncio.Protocol]()
        turns = limits.best_effort

        def protocol() -> asyncio.Protocol:
            new = asyncio.Protocol()
            opened.put_nowait(new)
            turns.charge(CONNECTION_SECONDS)
            return new

        turns.request = request  # type: ignore[method-assign,assignment]
        acceptor = Acceptor(listener, 1000, protocol, limits)
        with turns.paying():
            for _ in range(500):
                socket.create_connection(listener.getsockname()).close()
            client = socket.create_connection(listener.getsockname())
            await asyncio.wait_for(opened.get(), 30)
            await asyncio.sleep(0.01)
        assert opened.empty(), "those that had been closed"
        assert turns_taken < 100
        client.close()
        acceptor.close()


class _Lobby:
    """An acceptor in whose loop a tenant's request runs, and whose connections each cost what they cost the service."""

    def __init__(self, listener: socket.socket) -> None:
        self.opened: list[tuple[str, int]] = []
        self._listener, self._clients, self._transports = listener, list[socket.socket](), list[asyncio.BaseTransport]()
        self._has_opened = asyncio.Event()
        self.limits = _limits()
        self._turns = self.limits.best_effort
        self.acceptor = Acceptor(listener, 1000, self._protocol, self.limits)

    def _protocol(self) -> asyncio.Protocol:
        lobby = self

        class Connection(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                lobby._transports.append(transport)
                lobby.opened.append(transport.get_extra_info("peername"))
                lobby._turns.charge(CONNECTION_SECONDS)
                lobby._has_opened.set()

        return Connection()

    @classmethod
    @asynccontextmanager
    async def without_credit(cls, debt: float, slowness: int = 5) -> AsyncIterator[_Lobby]:
        """debt: seconds of the event loop; ten times as many pass before the first turn.

        slowness: factor of the clock that refills the credit, so that a busy machine seldom does while it is away.
        """
        slow_time = SimpleNamespace(monotonic=lambda: time.monotonic() / slowness)
        with socket.socket() as listener, pytest.MonkeyPatch.context() as patch:
            patch.setattr(best_effort, "time", slow_time)
            listener.bind(("127.0.0.1", 0))
            lobby = cls(listener)
            with lobby._turns.paying():
                lobby._turns.charge(debt)
                yield lobby
            lobby.acceptor.close()
            for one in (*lobby._transports, *lobby._clients):
                one.close()
            await asyncio.sleep(0.05)  # until the transports have closed

    def connect(self, host: str, data: bytes = b"") -> socket.socket:
        client = socket.create_connection(self._listener.getsockname(), source_address=(host, 0))
        self._clients.append(client)
        client.sendall(data)
        return client

    async def wait_for(self, client: socket.socket) -> None:
        while client.getsockname() not in self.opened:
            self._has_opened.clear()
            await asyncio.wait_for(self._has_opened.wait(), 10)


@async_test
async def test_a_client_that_connects_without_end_does_not_delay_another_address() -> None:
    """All new connections had one queue, so that the last of these waited behind 500: for a second."""
    async with _Lobby.without_credit(0.01) as lobby:
        for _ in range(500):
            lobby.connect("127.0.0.2", b"GET")
        assert lobby.acceptor.has_work
        await lobby.wait_for(lobby.connect("127.0.0.3", b"GET"))
        assert len(lobby.opened) < 300, "the flood came first"


@pytest.mark.parametrize("is_late", [False, True], ids=["with the connection", "later"])
@async_test
async def test_a_connection_with_a_known_key_is_opened_at_once(is_late: bool) -> None:
    async with _Lobby.without_credit(0.03) as lobby:
        for _ in range(20):
            lobby.connect("127.0.0.2", b"GET")
        client = lobby.connect("127.0.0.2", b"" if is_late else b"key")
        if is_late:
            await asyncio.sleep(0.05)
            client.sendall(b"key")
        await lobby.wait_for(client)
        assert len(lobby.opened) <= 10, "it waited for its turn"


@async_test
async def test_a_full_lobby_drops_the_oldest_of_the_address_with_the_most() -> None:
    async with _Lobby.without_credit(0.01) as lobby:
        other = lobby.connect("127.0.0.3", b"GET")
        crowd = [lobby.connect("127.0.0.2", b"GET") for _ in range(100)]
        await lobby.wait_for(crowd[-1])
        assert other.getsockname() in lobby.opened
        missing = [index for index, client in enumerate(crowd) if client.getsockname() not in lobby.opened]
        assert len(missing) > 50 and missing[-1] < 70
        assert lobby.limits.cut_by_reason["address"] == len(missing)
        with pytest.raises(ConnectionResetError):  # closed, not forgotten
            crowd[missing[0]].recv(1)
