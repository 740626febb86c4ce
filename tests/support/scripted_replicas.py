"""Replicas for tests of app/cluster: scripted ones, and real applications that die on demand."""

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
    """An event as a replica writes it; the gateway replaces its id."""
    return f"id: r:0\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode("ascii")


def token(text: str, index: int = 0) -> bytes:
    """A token event."""
    return event("token", index=index, text=text)


def done(*indices: int, finish_reason: str = "length") -> bytes:
    """The `done` event of these choices."""
    ends = [{"index": index, "finish_reason": finish_reason, "stop_reason": None} for index in indices or (0,)]
    return event("done", choices=ends)


class Lost:
    """Part of a scripted response at which the replica dies."""


class Silent:
    """Part of a scripted response at which the replica hangs without dying."""


class Accepted:
    """Part of a scripted response at which the replica accepts the request."""


Scripted = Head | bytes | type[Accepted | Lost | Silent] | asyncio.Event
"""Part of a scripted response; at an asyncio.Event the replica waits until it is set."""


class _ScriptedResponse(ReplicaResponse):
    """A response made of scripted parts."""

    def __init__(self, parts: Sequence[Scripted], replicas: ScriptedReplicas) -> None:
        self.replica, self.consume = "a", None
        self._parts, self._replicas = list(parts), replicas
        self._is_closed = False

    async def next_part(self) -> Scripted | None:
        """The next part of the script; None at the end."""
        while self._parts and not self._is_closed:
            part = self._parts[0]
            if isinstance(part, asyncio.Event):  # a caller that is cancelled here may retry
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
        head = await self.next_part()
        if not isinstance(head, Head):
            raise ReplicaLost
        self.head = head
        return head

    async def next(self) -> bytes | None:
        part = await self.next_part()
        assert part is None or isinstance(part, bytes)
        return part

    def close(self) -> None:
        self._replicas.closed += not self._is_closed
        self._is_closed = True


class ScriptedReplicas:
    """Responds to each request with the next script, and records the calls."""

    def __init__(self, *answers: Sequence[Scripted], all_of: Iterable[FullResponse | type[Lost | Silent]] = ()) -> None:
        self.calls: list[Call] = []
        self.calls_of_all: list[Call] = []
        self.closed = 0
        self._answers = list(answers)
        self._all = list(all_of)
        self.tasks: list[asyncio.Task[FullResponse]] = []
        """Tasks of the last broadcast."""

    async def send(self, call: Call) -> ReplicaResponse:
        """Starts the next scripted response."""
        response = _ScriptedResponse(self._answers[len(self.calls)], self)
        self.calls.append(call)
        try:
            assert await response.next_part() is Accepted
        except BaseException:
            response.close()
            raise
        return response

    def broadcast(self, call: Call) -> list[asyncio.Task[FullResponse]]:
        """Returns the same responses for every broadcast."""
        self.calls_of_all.append(call)
        self.tasks = [asyncio.ensure_future(_broadcast_response(one)) for one in self._all]
        return self.tasks


async def _broadcast_response(one: FullResponse | type[Lost | Silent]) -> FullResponse:
    if one is Lost:
        raise ReplicaLost
    if one is Silent:
        await asyncio.Event().wait()
    assert isinstance(one, FullResponse)
    return one


@asynccontextmanager
async def gateway_client(
    replicas: ScriptedReplicas | DyingReplicas, *, max_retries: int = 0, **settings: Any
) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of a gateway in this process; checks at the end that the gateway has closed every response."""
    gateway = Gateway(Settings(**settings), replicas, max_retries=max_retries)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=gateway), base_url="http://localhost") as client:
        yield client
    if isinstance(replicas, ScriptedReplicas):
        # Closed at once, not by garbage collection: the replica would compute until then.
        assert replicas.closed == len(replicas.calls)
        assert all(task.done() for task in replicas.tasks)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Yields to other tasks until the condition is true."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError


def accepted(*parts: Scripted) -> list[Scripted]:
    """Script of a request that a replica accepted."""
    return [Accepted, *parts]


@asynccontextmanager
async def serve_replicas(
    *apps: ASGIApp,
) -> AsyncGenerator[tuple[ReplicaPool, list[Address], list[ReplicaServer]], None]:
    """Serves the applications as replicas a, b, ... of a pool, over TCP."""
    pool, servers = ReplicaPool(), [ReplicaServer(app, chr(ord("a") + index)) for index, app in enumerate(apps)]
    addresses = [await server.start("127.0.0.1") for server in servers]
    pool.update(addresses)
    try:
        yield pool, addresses, servers
    finally:
        pool.update([])
        for server in servers:
            await server.drain(10)


class DyingReplicas:
    """A pool whose first responses die after `deaths` parts each: accepted, head, pieces of the body."""

    def __init__(self, pool: ReplicaPool, deaths: Sequence[int] = ()) -> None:
        self._pool = pool
        self._deaths = list(deaths)
        self.broadcast = pool.broadcast

    async def send(self, call: Call) -> ReplicaResponse:
        """The application's response, cut off by the next of `deaths`."""
        if not self._deaths:
            return await self._pool.send(call)
        if not (n_parts := self._deaths.pop(0)):
            raise ReplicaLost
        return _DyingResponse(await self._pool.send(call), n_parts - 1)


class _DyingResponse(ReplicaResponse):
    def __init__(self, real: ReplicaResponse, n_parts: int) -> None:
        self.replica, self.consume = real.replica, None
        self._real, self._left = real, n_parts

    def _count_part(self) -> None:
        if not self._left:
            raise ReplicaLost
        self._left -= 1

    async def read_head(self) -> Head:
        self._count_part()
        self.head = await self._real.read_head()
        return self.head

    async def next(self) -> bytes | None:
        self._count_part()
        return await self._real.next()

    def close(self) -> None:
        self._real.close()
