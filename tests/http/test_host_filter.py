"""The host filter judges each request by its own host, whatever it accepted before."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from app.http.host_filter import TARGET_HOST_KEY, HostFilter
from app.http.request_log import RequestLogMiddleware
from tests.support.async_test import async_test

ACCEPTED = [b"127.0.0.1:8000", b"[::1]", b"localhost", b"a.example", b"A.EXAMPLE:80"]
REFUSED = [b"", b":80", b"b.example", b"127.0.0.1:8000 ", b"127.0.0.1:8000,b.example", b"1.2.3", b"[::1"]


async def _status(host_filter: RequestLogMiddleware, hosts: list[bytes], target: bytes | None = None) -> int:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        pytest.fail("the body must not be read")

    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "http_version": "1.1"}
    scope["headers"] = [(b"host", host) for host in hosts]
    if target is not None:
        scope[TARGET_HOST_KEY] = target
    await host_filter(scope, receive, send)
    status: int = messages[0]["status"]
    return status


async def _accept(_scope: Scope, _receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})


@pytest.mark.parametrize("before", [None, *ACCEPTED])
@async_test
async def test_earlier_accepted_hosts_do_not_matter(before: bytes | None) -> None:
    host_filter = RequestLogMiddleware(HostFilter(_accept, ["a.example"]))
    for refused in REFUSED:
        if before is not None:
            assert await _status(host_filter, [before]) == 204
            assert await _status(host_filter, [before, before]) == 400
            assert await _status(host_filter, [before], target=refused) in (400, 421)
        assert await _status(host_filter, [refused]) in (400, 421)
    assert await _status(host_filter, []) == 400
    for accepted in ACCEPTED:
        assert await _status(host_filter, [accepted], target=accepted) == 204
