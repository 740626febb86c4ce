"""Requests over TCP between a gateway and its replicas: complete, lost, cancelled, refused, without the secret."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest
from starlette.types import Receive, Scope, Send

from app.cluster import replica_pool
from app.cluster.messages import Address, Call, Head, ReplicaLost
from app.cluster.replica_pool import ReplicaPool, ReplicaResponse
from tests.support.async_test import async_test
from tests.support.scripted_replicas import serve_replicas, wait_until

CALL = Call(request_id="req-1", method="POST", path="/complete", query=b"", headers=(), body=b"{}")
HEADERS = [(b"content-type", b"text/event-stream"), (b"x-name", "café".encode("latin-1"))]


class _Application:
    """Sends the body parts that tests put into `parts`; None ends the response."""

    def __init__(self, *parts: bytes | None) -> None:
        self.parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        for part in parts:
            self.parts.put_nowait(part)
        self.n_requests = 0
        self.is_cancelled = False

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        self.n_requests += 1
        assert (await receive())["body"] == CALL.body
        await send({"type": "http.response.start", "status": 201, "headers": HEADERS})
        try:
            while (part := await self.parts.get()) is not None:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        await send({"type": "http.response.body", "body": b""})


async def _start(pool: ReplicaPool) -> ReplicaResponse:
    """Sends a request and reads the head of the response."""
    response = await pool.send(CALL)
    assert await response.read_head() == Head(201, tuple(HEADERS))
    return response


async def _fetch(pool: ReplicaPool) -> bytes:
    """Sends a request and reads the whole body."""
    response = await _start(pool)
    body = await response.body()
    response.close()
    return body


@async_test
async def test_response_arrives_in_parts_and_complete() -> None:
    app = _Application()
    async with serve_replicas(app) as (pool, _, (server,)):
        response = await _start(pool)
        assert response.replica == "a"
        for part in (b"a", b"x" * 300_000):
            app.parts.put_nowait(part)
            body = b""
            while len(body) < len(part):
                body += await response.next() or b""
            assert body == part
        app.parts.put_nowait(None)
        assert await response.next() is None
        response.close()
        await wait_until(lambda: not server.n_open)


@async_test
async def test_consumer_may_take_body_parts_as_they_arrive() -> None:
    app, consumed = _Application(), list[bytes]()

    def consume(body: bytes) -> bool:
        if body.startswith(b"left"):
            return False
        consumed.append(body)
        return True

    async with serve_replicas(app) as (pool, _, _):
        response = await _start(pool)
        response.consume = consume
        rest = asyncio.ensure_future(response.body())
        for part in (b"one", b"two", b"left for the reader", b"three"):
            app.parts.put_nowait(part)
            await asyncio.sleep(0.01)
        app.parts.put_nowait(None)
        assert await rest == b"left for the reader"
        assert consumed == [b"one", b"two", b"three"]


@pytest.mark.parametrize("size", [100_000, 1_000_000], ids=["in one piece", "in many pieces"])
@async_test
async def test_unread_response_waits_in_the_replica(size: int) -> None:
    app, n_sent = _Application(), 40_000_000 // size
    for _ in range(n_sent):
        app.parts.put_nowait(bytes(size))
    app.parts.put_nowait(None)
    async with serve_replicas(app) as (_, addresses, _):
        connection = await replica_pool._Connection.open(addresses[0])
        assert await connection.request(CALL)
        await asyncio.sleep(0.2)
        assert connection._n_unread < 2_000_000, "the response has 40 MB"
        await connection.read_head()
        body = b""
        while not connection.is_complete:
            body += await connection.read_body(None)
            await asyncio.sleep(0.001)  # part of a frame arrives during the write to the client
        assert body == bytes(n_sent * size)
        connection.close()


@async_test
async def test_disconnect_before_acceptance_does_not_blame_the_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_pool, "_AVOID_SECONDS", 3600.0)
    async with serve_replicas(_Application(b"a", None, b"a", None)) as (pool, _, _servers):
        leaving = asyncio.create_task(_fetch(pool))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        async with asyncio.timeout(30):
            assert await _fetch(pool) == b"a"


@async_test
async def test_sequential_requests_share_a_connection() -> None:
    app = _Application(*[b"a", None] * 3)
    async with serve_replicas(app) as (pool, _, (server,)):
        connections = len(asyncio.all_tasks())
        for _ in range(3):
            assert await _fetch(pool) == b"a"
        assert len(asyncio.all_tasks()) - connections == 2, "one task for the connection, one for its next request"
        assert app.n_requests == 3
        await wait_until(lambda: not server.n_open)


@async_test
async def test_the_replica_with_the_fewest_open_requests_gets_the_next_one() -> None:
    async with serve_replicas(_Application(), _Application(), _Application()) as (pool, addresses, _):
        responses = [await pool.send(CALL) for _ in range(6)]
        chosen = [response.replica for response in responses]
        assert sorted(chosen) == [*"aabbcc"]
        responses[chosen.index("b")].close()
        responses.append(await pool.send(CALL))
        assert responses[-1].replica == "b"
        pool.update(addresses[:2])
        responses += [await pool.send(CALL) for _ in range(2)]
        assert {response.replica for response in responses[-2:]} == {"a", "b"}
        for response in responses:
            response.close()


@async_test
async def test_closing_the_response_cancels_the_request() -> None:
    app = _Application()
    async with serve_replicas(app) as (pool, _, (server,)):
        response = await _start(pool)
        response.close()
        response.close()
        await asyncio.wait_for(server._is_idle.wait(), 60)
        assert app.is_cancelled


@async_test
async def test_failing_replica_is_lost() -> None:
    async def broken(_scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise OSError("bug")

    async with serve_replicas(broken) as (pool, _, _):
        response = await pool.send(CALL)
        assert await response.read_head() == Head(200, ())
        with pytest.raises(ReplicaLost):
            await response.body()
        response.close()


@async_test
async def test_draining_replica_refuses_new_requests_and_finishes_open_ones() -> None:
    leaving, other = _Application(), _Application(b"other", None)
    async with serve_replicas(leaving, other) as (pool, addresses, (server, _)):
        pool.update(addresses[:1])
        open_response = await _start(pool)
        connected = await replica_pool._Connection.open(addresses[0])
        draining = asyncio.ensure_future(server.drain(60))
        await wait_until(lambda: server._is_draining)
        assert not await connected.request(CALL)
        connected.close()
        refused = asyncio.ensure_future(_fetch(pool))
        await asyncio.sleep(0.01)
        pool.update(addresses)
        assert await asyncio.wait_for(refused, 60) == b"other"
        assert not draining.done() and leaving.n_requests == 1
        for part in (b"rest", None):
            leaving.parts.put_nowait(part)
        assert await open_response.body() == b"rest"
        open_response.close()
        await asyncio.wait_for(draining, 60)


@async_test
async def test_a_request_waits_for_a_replica() -> None:
    async with serve_replicas(_Application(b"a", None)) as (_, addresses, _):
        pool = ReplicaPool()
        waiting = asyncio.ensure_future(_fetch(pool))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        pool.update(addresses)
        assert await asyncio.wait_for(waiting, 60) == b"a"
        pool.update([])


@async_test
async def test_dead_and_hanging_replicas_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_pool, "_ACCEPT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as hung, socket.create_server(("127.0.0.1", 0)) as gone:
        bad = [Address("x", *listener.getsockname(), bytes(16)) for listener in (hung, gone)]
        gone.close()
        async with serve_replicas(_Application(*[b"a", None] * 4)) as (pool, addresses, _):
            pool.update([*bad, *addresses])
            for _ in range(4):
                assert await _fetch(pool) == b"a"


@async_test
async def test_replica_refuses_requests_without_its_secret() -> None:
    app = _Application(b"a", None)
    async with serve_replicas(app) as (_, (address,), _):
        pool = ReplicaPool()
        pool.update([replace(address, secret=bytes(16))])
        with pytest.raises(ReplicaLost):
            await pool.send(CALL)
        assert app.n_requests == 0


@async_test
async def test_vanished_machine_is_detected_by_tcp_timeouts() -> None:
    """It closes no connection: keepalive probes detect that for idle ones, TCP_USER_TIMEOUT for unacknowledged data."""
    async with serve_replicas(_Application(b"a", None)) as (_, (address,), _):
        connection = await replica_pool._Connection.open(address)
        of_system = connection._transport.get_extra_info("socket")
        assert of_system.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            of_system.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert 1000 * (idle + interval * count) == of_system.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        connection.close()


@async_test
async def test_broadcast_reaches_every_replica_and_reports_lost_ones() -> None:
    async with serve_replicas(_Application(b"a", None), _Application(b"b", None)) as (pool, addresses, _):
        pool.update([*addresses, Address("x", "127.0.0.1", 9, bytes(16))])
        responses = await asyncio.gather(*pool.broadcast(CALL), return_exceptions=True)
        assert [one.body for one in responses[:2] if not isinstance(one, BaseException)] == [b"a", b"b"]
        assert isinstance(responses[2], ReplicaLost)


@async_test
async def test_request_cancelled_before_acceptance_leaves_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:
        pool = ReplicaPool()
        pool.update([Address("x", *hung.getsockname(), bytes(16))])
        waiting = asyncio.ensure_future(pool.send(CALL))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert [replica.n_open for replica in pool._replicas.values()] == [0]
