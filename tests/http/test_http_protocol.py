"""What tests/promises do not cover of the HTTP protocol class."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Awaitable, Callable

import httpx
import pytest
import uvloop

from app.http.http_protocol import HttpProtocol
from tests.support.http.framing_harness import LIMITS, Harness, MemoryTransport, Served
from tests.support.http.raw_client import connect, error_of, post_request, read_all, status_of
from tests.support.servers import Server


@pytest.mark.parametrize("path", ["/", "/docs", "/web/main.js", "/health", "/health/live", "/health/ready", "/metrics"])
def test_head_is_get_without_the_body(server: Server, path: str) -> None:
    head, whole = httpx.head(server.url + path), httpx.get(server.url + path)
    assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"CONNECT example:80 HTTP/1.1\r\n\r\n",
        b"POST /complete HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /complete HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nzz\r\n",
        b"GET /health/live HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /health/live HTTP/0.9\r\nHost: x\r\n\r\n",
        b"POST /complete HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"POST /complete HTTP/1.1\r\nHost: x\r\n" + 2 * b"Transfer-Encoding: chunked\r\n" + b"\r\n0\r\n\r\n",
    ],
)
def test_malformed_http_gets_400_in_the_common_shape(server: Server, data: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(data)
        output = read_all(connection)
    assert status_of(output) == 400
    assert error_of(output)["type"] == "invalid_request_error"
    assert b"server:" not in output.lower()


def test_garbage_after_a_request_does_not_prevent_its_response(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(post_request({"prompt": "a", "max_tokens": 3, "stream": False}) + b"\0\1\2 rubbish\r\n\r\n")
        output = read_all(connection)
    assert output.count(b"HTTP/1.1 ") == 1 and status_of(output) == 200


def test_compressed_body_is_refused_before_it_is_read(server: Server) -> None:
    def send_body(coding: str) -> bytes:
        with connect(server) as connection:
            body = {"prompt": "a", "max_tokens": 1, "stream": False}
            connection.sendall(post_request(body, "/complete", f"Content-Encoding: {coding}", "Connection: close"))
            return read_all(connection)

    refused = send_body("gzip")
    assert (status_of(refused), "Content-Encoding" in error_of(refused)["message"]) == (415, True)
    assert b"accept-encoding: identity" in refused.lower()
    assert status_of(send_body("identity")) == 200


def test_active_request_receives_the_disconnect_while_another_is_pipelined() -> None:
    request = b"POST /complete HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"

    async def run() -> list[bool]:
        released = asyncio.Event()

        async def disconnect(connection: HttpProtocol) -> None:
            connection.transport.abort()
            connection.connection_lost(ConnectionResetError())
            released.set()

        with Harness(before_reading=released.wait) as harness:
            result = await harness.serve((2 * request,), then=disconnect)
        assert not result.log
        return [bool(received and received.is_complete) for received in result.requests]

    assert uvloop.run(run()) == [False], "only the started request must receive the disconnect"


HURRIED = dataclasses.replace(LIMITS, connections=1, linger_seconds=0.01, parse_seconds=0.0005)
CHUNKED_HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def _respond_early(then: Callable[[HttpProtocol], Awaitable[object]]) -> Served:
    """Sends the head of a request, to which the application responds without the body; then calls `then`."""

    async def run() -> Served:
        with Harness(limits=HURRIED) as harness:
            harness.reads_body = False
            return await harness.serve((CHUNKED_HEAD,), then=then)

    return uvloop.run(run())


def test_after_an_early_response_the_body_may_arrive_slowly_and_the_next_request_is_answered() -> None:
    """The response had no Connection: close. The time to linger is for responses that have."""

    async def send_rest(connection: HttpProtocol) -> None:
        for piece in (b"5\r\nhe", b"llo\r\n", b"0\r\n\r\n" + GET):
            await asyncio.sleep(0.1)
            connection.data_received(piece)

    result = _respond_early(send_rest)
    assert (result.statuses, result.is_closed, result.log) == ([200, 200], False, [])
    assert b"connection: close" not in result.output.lower()


def test_a_connection_with_an_early_response_makes_room_for_another_until_its_next_request() -> None:
    async def connect_another(connection: HttpProtocol) -> None:
        assert connection._connections.count == 1
        assert connection._connections.register(MemoryTransport(bytearray()), "192.0.2.2")
        assert connection.transport.is_closing(), "the new connection has evicted this one"

    assert _respond_early(connect_another).statuses == [200]


def test_a_framing_error_after_an_early_response_ends_the_connection_without_a_reset() -> None:
    """A reset would discard the response in the client's buffer."""

    async def send_error(connection: HttpProtocol) -> None:
        connection.data_received(b"zz\r\n")
        assert not connection.transport.is_closing(), "it lingers"

    result = _respond_early(send_error)
    assert (result.statuses, result.is_closed, result.log) == ([200], True, [])


@pytest.mark.parametrize("head", ["", "Idempotency-Key: old\r\n"])
def test_a_stream_for_http_1_0_has_no_chunks_and_ends_with_the_connection(server: Server, head: str) -> None:
    """RFC 9112, 6.1: the client would take the sizes of chunks for text. The second request may be a replay."""
    modern = post_request({"prompt": "a", "max_tokens": 5, "seed": 1}, "/complete", "Connection: close")
    old = modern.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n" + head.encode(), 1)
    for _ in range(2):
        with connect(server) as connection:
            connection.sendall(old)
            response, _, body = read_all(connection).partition(b"\r\n\r\n")
        assert status_of(response) == 200
        assert b"transfer-encoding" not in response.lower() and b"connection: close" in response.lower()
        assert body.startswith(b"id: ") and body.endswith(b"\n\n")
        assert body.count(b"\nevent: done\n") == 1


def test_a_response_of_known_length_keeps_it_for_http_1_0(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(
            post_request({"prompt": "a", "max_tokens": 3, "stream": False}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        )
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert status_of(head) == 200
    assert f"content-length: {len(body)}\r\n".encode() in head.lower() + b"\r\n"


def test_input_after_a_response_is_read_up_to_a_limit_and_then_ends_the_connection() -> None:
    """Tiny chunks without end, after a response that did not wait for the body, took all of the event loop's time."""

    async def flood(connection: HttpProtocol) -> None:
        sent = 0
        while not connection.transport.is_closing() and sent < 10 * LIMITS.discarded_bytes:
            if not connection.transport.is_paused:  # type: ignore[attr-defined]
                connection.data_received(b"1\r\na\r\n" * 10_000)
                sent += 60_000
            await asyncio.sleep(0)
        assert connection.transport.is_closing() and sent < 3 * LIMITS.discarded_bytes

    result = _respond_early(flood)
    assert (result.statuses, result.log) == ([200], [])


def test_costly_input_is_parsed_in_turns_and_arrives_complete() -> None:
    async def run() -> tuple[int, Served]:
        waited = 0
        with Harness(limits=dataclasses.replace(LIMITS, parse_seconds=0.0005)) as harness:

            async def send_rest(connection: HttpProtocol) -> None:
                nonlocal waited
                connection.data_received(b"1\r\na\r\n" * 30_000 + b"0\r\n\r\n")
                while connection._unparsed:
                    waited += 1
                    await asyncio.sleep(0)

            served = await harness.serve((CHUNKED_HEAD,), then=send_rest)
        return waited, served

    waited, result = uvloop.run(run())
    assert waited > 5, "180 kB of tiny chunks take several turns"
    assert [request.body for request in result.requests if request] == [b"a" * 30_000]
    assert (result.statuses, result.is_closed, result.log) == ([200], False, [])


@pytest.mark.parametrize("request_bytes", [GET, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"])
def test_a_request_leaves_no_reference_cycle(request_bytes: bytes) -> None:
    """A full garbage collection stalls every stream."""
    n_unreachable = -1

    async def repeat(connection: HttpProtocol) -> None:
        nonlocal n_unreachable
        gc.collect()
        for _ in range(50):
            connection.data_received(request_bytes)
            for _ in range(6):  # iterations of the event loop until it is answered
                await asyncio.sleep(0)
        n_unreachable = gc.collect()

    async def run() -> Served:
        with Harness() as harness:
            return await harness.serve((request_bytes,), then=repeat)

    gc.disable()
    try:
        assert len(uvloop.run(run()).statuses) == 51
    finally:
        gc.enable()
    assert n_unreachable == 0
