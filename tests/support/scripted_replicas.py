"""Replicas for tests of app/cluster: scripted ones, or real applications that a test can kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from app.cluster.gateway import Gateway
from app.cluster.messages import Address, Call, FullResponse, Head, ReplicaLost
from app.cluster.replica_pool import ReplicaPool, ReplicaResponse
from app.cluster.replica_server import ReplicaServer
from app.common.settings import Settings

EVENTS = Head(200, ((b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"r")))
JSON = Head(200, ((b"content-type", b"application/json"),))
START = {"weights_version": "w", "seed": 7, "prompt_tokens": 1, "settings": {}}


def event(name: str, **data: Any) -> bytes:
    """As a replica writes it; its number is none of the relay's business."""
    return f"id: r:0\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode("ascii")


def token(text: str, index: int = 0) -> bytes:
    """An event with text."""
    return event("token", index=index, text=text)


def done(*indices: int, finish_reason: str = "length") -> bytes:
    """The last event."""
    ends = [{"index": index, "finish_reason": finish_reason, "stop_reason": None} for index in indices or (0,)]
    return event("done", choices=ends)


class Lost:
    """In a scripted answer: here the replica dies."""


class Silent:
    """In a scripted answer: the replica hangs from here on, without dying."""


class Accepted:
    """In a scripted answer: here the replica accepts the request."""


Scripted = Head | bytes | type[Accepted | Lost | Silent] | asyncio.Event
"""Part of a scripted answer; the replica waits for an event."""


class _ScriptedResponse(ReplicaResponse):
    """An answer whose parts a test has written down."""

    def __init__(self, parts: Sequence[Scripted], replicas: Played) -> None:
        self.replica, self.consume = "a", None
        self._parts, self._replicas = list(parts), replicas
        self._is_closed = False

    async def play(self) -> Scripted | None:
        """The next part; None at the end."""
        while self._parts and not self._is_closed:
            part = self._parts[0]
            if isinstance(part, asyncio.Event):  # who is cancelled while it waits may ask again
                await part.wait()
            elif part is Silent:
                await asyncio.Event().wait()
            match self._parts.pop(0):
                case asyncio.Event():
                    pass
                case type() if part is Lost:
                    raise ReplicaLost
                case bytes(body) if self.consume and self.consume(body):
                    pass
                case _:
                    return part
        return None

    async def read_head(self) -> Head:
        head = await self.play()
        if not isinstance(head, Head):
            raise ReplicaLost
        self.head = head
        return head

    async def next(self) -> bytes | None:
        part = await self.play()
        assert part is None or isinstance(part, bytes)
        return part

    def close(self) -> None:
        self._replicas.closed += not self._is_closed
        self._is_closed = True


class Played:
    """Answers the first request with the first list, and so on; notes what it was asked."""

    def __init__(self, *answers: Sequence[Scripted], all_of: Iterable[FullResponse | type[Lost | Silent]] = ()) -> None:
        self.calls: list[Call] = []
        self.calls_of_all: list[Call] = []
        self.closed = 0
        self._answers = list(answers)
        self._all = list(all_of)
        self.tasks: list[asyncio.Task[FullResponse]] = []
        """Tasks of the last broadcast."""

    async def send(self, call: Call) -> ReplicaResponse:
        """Plays the next scripted answer."""
        response = _ScriptedResponse(self._answers[len(self.calls)], self)
        self.calls.append(call)
        try:
            assert await response.play() is Accepted
        except BaseException:
            response.close()
            raise
        return response

    def broadcast(self, call: Call) -> list[asyncio.Task[FullResponse]]:
        """The same answer to every request."""
        self.calls_of_all.append(call)
        self.tasks = [asyncio.ensure_future(_come(one)) for one in self._all]
        return self.tasks


async def _come(one: FullResponse | type[Lost | Silent]) -> FullResponse:
    if one is Lost:
        raise ReplicaLost
    if one is Silent:
        await asyncio.Event().wait()
    assert isinstance(one, FullResponse)
    return one


@asynccontextmanager
async def client_of(
    replicas: Played | Mortal, *, max_retries: int = 0, **settings: Any
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of a gateway in this process. Every replica must have been let go by the end of the block."""
    gateway = Gateway(Settings(**settings), replicas, max_retries=max_retries)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=gateway), base_url="http://localhost") as client:
        yield client
    if isinstance(replicas, Played):
        # At once, not at the next garbage collection: a replica would compute until then.
        assert replicas.closed == len(replicas.calls)
        assert all(task.done() for task in replicas.tasks)


async def until(condition: Callable[[], bool]) -> None:
    """Others have their turns until it holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError


def taken(*parts: Scripted) -> list[Scripted]:
    """An answer whose request has come to a replica."""
    return [Accepted, *parts]


@asynccontextmanager
async def served(*apps: ASGIApp) -> AsyncGenerator[tuple[ReplicaPool, list[Address], list[ReplicaServer]], None]:
    """A pool of replicas named a, b, ... with these applications, over TCP."""
    pool, servers = ReplicaPool(), [ReplicaServer(app, chr(ord("a") + index)) for index, app in enumerate(apps)]
    addresses = [await server.start("127.0.0.1") for server in servers]
    pool.update(addresses)
    try:
        yield pool, addresses, servers
    finally:
        pool.update([])
        for server in servers:
            await server.drain(10)


class Mortal:
    """A pool whose first answers die after as many parts as `deaths` says: accepted, head, pieces of the body."""

    def __init__(self, pool: ReplicaPool, deaths: Sequence[int] = ()) -> None:
        self._pool = pool
        self._deaths = list(deaths)
        self.broadcast = pool.broadcast

    async def send(self, call: Call) -> ReplicaResponse:
        """The application's answer, as far as it comes."""
        if not self._deaths:
            return await self._pool.send(call)
        if not (n_parts := self._deaths.pop(0)):
            raise ReplicaLost
        return _MortalResponse(await self._pool.send(call), n_parts - 1)


class _MortalResponse(ReplicaResponse):
    def __init__(self, real: ReplicaResponse, n_parts: int) -> None:
        self.replica, self.consume = real.replica, None
        self._real, self._left = real, n_parts

    def _live(self) -> None:
        if not self._left:
            raise ReplicaLost
        self._left -= 1

    async def read_head(self) -> Head:
        self._live()
        self.head = await self._real.read_head()
        return self.head

    async def next(self) -> bytes | None:
        self._live()
        return await self._real.next()

    def close(self) -> None:
        self._real.close()
