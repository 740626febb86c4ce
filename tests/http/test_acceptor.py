"""The listening socket."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from app.http.acceptor import Acceptor
from app.http.best_effort import CONNECTION_SECONDS, BestEffortTurns
from tests.support.async_test import async_test


class _SocketWithoutDescriptors(socket.socket):
    """A listening socket that can accept nothing."""

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(errno.EMFILE, "Too many open files")


@async_test
async def test_without_file_descriptors_the_acceptor_waits_for_one_turn_at_a_time() -> None:
    with _SocketWithoutDescriptors() as listener:
        listener.bind(("127.0.0.1", 0))
        turns = BestEffortTurns()
        acceptor = Acceptor(listener, 16, asyncio.Protocol, turns)

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

            acceptor = Acceptor(listener, 16, protocol, BestEffortTurns())
            with socket.create_connection(listener.getsockname()):
                await asyncio.wait_for(opened.wait(), 5)
            acceptor.close()
            assert listener.failures == 0

    for _ in range(3):
        runner(accept_one())


@async_test
async def test_connections_that_their_clients_have_closed_delay_the_next_one_little() -> None:
    """The 500 took a turn each: a client that connected and closed without end delayed all others by seconds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        turns, opened = BestEffortTurns(), asyncio.Queue[asyncio.Protocol]()

        def protocol() -> asyncio.Protocol:
            new = asyncio.Protocol()
            opened.put_nowait(new)
            turns.charge(CONNECTION_SECONDS)
            return new

        acceptor = Acceptor(listener, 1000, protocol, turns)
        with turns.paying():
            for _ in range(500):
                socket.create_connection(listener.getsockname()).close()
            client = socket.create_connection(listener.getsockname())
            await asyncio.wait_for(opened.get(), 0.5)
            await asyncio.sleep(0.01)
        assert opened.empty(), "those that had been closed"
        client.close()
        acceptor.close()
