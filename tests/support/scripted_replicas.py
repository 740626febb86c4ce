"""Replicas for tests of app/cluster: scripted ones, or real applications that a test can kill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
from starlette.types import ASGIApp

from app.cluster.gateway import Gateway
from app.cluster.messages import (
    Accepted,
    Address,
    BodyConsumer,
    Call,
    FullResponse,
    Head,
    ReplicaLost,
    ResponsePart,
    take_nothing,
)
from app.cluster.replica_pool import ReplicaPool
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


Scripted = ResponsePart | type[Lost | Silent] | asyncio.Event
"""Part of a scripted answer; the replica waits for an event."""


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

    async def send(self, call: Call, consume: BodyConsumer) -> AsyncGenerator[ResponsePart, None]:
        """Plays the next scripted answer."""
        index = len(self.calls)
        self.calls.append(call)
        try:
            for part in self._answers[index]:
                if part is Lost:
                    raise ReplicaLost
                if part is Silent:
                    await asyncio.Event().wait()
                if isinstance(part, asyncio.Event):
                    await part.wait()
                    continue
                assert not isinstance(part, type)
                if not (isinstance(part, bytes) and consume(part)):
                    yield part
        finally:
            self.closed += 1

    async def broadcast(self, call: Call) -> list[asyncio.Task[FullResponse]]:
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
    return [Accepted("a"), *parts]


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
    """A pool whose first answers die after so many parts as `deaths` says, one by one."""

    def __init__(self, pool: ReplicaPool, deaths: Sequence[int] = ()) -> None:
        self._pool = pool
        self._deaths = list(deaths)
        self.broadcast = pool.broadcast

    async def send(self, call: Call, consume: BodyConsumer) -> AsyncGenerator[ResponsePart, None]:
        """The application's answer, as far as it comes."""
        left = self._deaths.pop(0) if self._deaths else None
        async with aclosing(self._pool.send(call, take_nothing if left is not None else consume)) as parts:
            async for part in parts:
                if left == 0:
                    raise ReplicaLost
                yield part
                left = left and left - 1
