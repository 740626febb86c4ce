"""uvicorn runs the protocol by its setting `http`, with its own listener and graceful shutdown."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from app.http.connection_limits import ConnectionLimits
from app.http.http_protocol import HttpProtocol
from tests.support.async_test import async_test
from tests.support.http.framing_harness import LIMITS

GET = b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n"


@async_test
async def test_plain_uvicorn_serves_and_drains_with_the_protocol() -> None:
    may_answer = asyncio.Event()

    async def application(scope: Scope, _receive: Receive, send: Send) -> None:
        if scope["path"] == "/2":
            await may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    listener = socket.create_server(("127.0.0.1", 0))
    protocol: Any = partial(HttpProtocol, ConnectionLimits(LIMITS))
    server = uvicorn.Server(
        uvicorn.Config(application, http=protocol, ws="none", lifespan="off", log_config=None, access_log=False)
    )
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    async with asyncio.timeout(10):
        for number in (1, 2):
            writer.write(GET % number)
            if number == 2:
                await asyncio.sleep(0.05)
                server.should_exit = True
                await asyncio.sleep(0.3)
                assert not serving.done(), "it waits for the second request"
                may_answer.set()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n") and await reader.readexactly(2) == b"/%d" % number
        assert await reader.read() == b""
        await serving
    writer.close()
    assert server.server_state.total_requests == 2
