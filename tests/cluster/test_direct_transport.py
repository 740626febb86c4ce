"""Responses over TCP between a replica and its gateway: complete, lost, cancelled, with wrong tickets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app.cluster.direct_transport import ResponseServer, fetch
from app.cluster.messages import Accepted, Call, Head, Offer, ReplicaLost
from tests.support.async_test import async_test

CALL = Call(request_id="req-1", method="POST", path="/complete", query=b"", headers=(), body=b"{}")
HEADERS = [(b"content-type", b"text/event-stream"), (b"x-name", "café".encode("latin-1"))]


class _Application:
    """Sends the parts that it gets from `parts`; None ends the response."""

    def __init__(self) -> None:
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.is_cancelled = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == CALL.body
        await send({"type": "http.response.start", "status": 201, "headers": HEADERS})
        try:
            while (part := await self.parts.get()) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def _offered(app: Any) -> AsyncGenerator[tuple[Offer, asyncio.Future[Any], ResponseServer], None]:
    """A replica's offer, and what ends when the replica has served it."""
    server = ResponseServer(app, "replica-1")
    await server.start("127.0.0.1")
    messages = server.answer(CALL)
    accepted = await anext(messages)
    assert isinstance(accepted, Accepted) and accepted.offer and accepted.replica == "replica-1"
    end = asyncio.ensure_future(anext(messages, None))
    try:
        yield accepted.offer, end, server
    finally:
        end.cancel()
        await asyncio.gather(end, return_exceptions=True)
        await messages.aclose()
        server.stop()


@async_test
async def test_a_response_arrives_part_by_part_and_whole() -> None:
    app = _Application()
    async with _offered(app) as (offer, end, _):
        parts = fetch(offer, end)
        assert await anext(parts) == Head(201, tuple(HEADERS))
        for part in (b"a", b"x" * 300_000):
            app.parts.put_nowait(part)
            received = await anext(parts)
            while len(received) < len(part):  # type: ignore[arg-type]
                received += await anext(parts)  # type: ignore[operator]
            assert received == part
        app.parts.put_nowait(None)
        assert await anext(parts, None) is None
        assert await asyncio.wait_for(end, 10) is None, "the cluster counts the request no longer"


@async_test
async def test_parts_that_wait_come_as_one() -> None:
    app = _Application()
    for part in (b"a", b"b", b"c", None):
        app.parts.put_nowait(part)
    async with _offered(app) as (offer, end, _):
        body = [part async for part in fetch(offer, end)][1:]
    assert body == [b"abc"]


@async_test
async def test_a_gateway_that_leaves_cancels_the_request() -> None:
    app = _Application()
    async with _offered(app) as (offer, end, _):
        parts = fetch(offer, end)
        await anext(parts)
        await parts.aclose()
        await asyncio.wait_for(end, 10)
        assert app.is_cancelled


@async_test
async def test_a_replica_that_breaks_is_lost() -> None:
    async def broken(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("bug")

    async with _offered(broken) as (offer, end, _):
        parts = fetch(offer, end)
        assert [await anext(parts), await anext(parts)] == [Head(200, ()), b"half"]
        with pytest.raises(ReplicaLost):
            await anext(parts)


@async_test
async def test_a_replica_that_the_cluster_has_lost_is_not_waited_for() -> None:
    """The network to it is silent, as it is when its machine loses power."""
    async with _offered(_Application()) as (offer, _, _):
        loss: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parts = fetch(offer, loss)
        await anext(parts)
        waiting = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        loss.set_exception(ConnectionError("the node died"))
        with pytest.raises(ReplicaLost):
            await asyncio.wait_for(waiting, 10)


@async_test
async def test_a_ticket_is_valid_once_and_only_while_the_request_is_offered() -> None:
    app = _Application()
    async with _offered(app) as (offer, end, server):
        for ticket in ("f" * 32, "\0" * 32):
            with pytest.raises(ReplicaLost):
                await anext(fetch(replace(offer, ticket=ticket), end))
        first = fetch(offer, end)
        await anext(first)
        with pytest.raises(ReplicaLost):
            await anext(fetch(offer, end))
        await first.aclose()
        withdrawn = server.answer(CALL)
        accepted = await anext(withdrawn)
        await withdrawn.aclose()
        assert accepted.offer
        with pytest.raises(ReplicaLost):
            await anext(fetch(accepted.offer, end))
    with pytest.raises(ReplicaLost):
        await anext(fetch(offer, end))
