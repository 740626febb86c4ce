"""Requests with an Idempotency-Key: 409 while the first one runs; its response is repeated after its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from app.common.errors import RateLimitExceeded
from app.http.auth import AuthMiddleware
from app.http.idempotency import IdempotencyMiddleware
from app.http.incoming_bodies import IncomingBodies
from app.http.request_log import RequestLogMiddleware
from tests.support.async_test import async_test


class _Application:
    """Sends `parts` one by one when `step` is called; counts its calls and the disconnects that it received."""

    def __init__(self, parts: tuple[bytes, ...] = (b"one", b"two"), status: int = 200) -> None:
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self.sent = 0
        self._parts, self._status = parts, status
        self._steps = asyncio.Semaphore(0)

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self._steps.release()

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        body, has_more = b"", True
        while has_more:
            message = await receive()
            body, has_more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        watching = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": self._status, "headers": []})
        for part in self._parts:
            stepping = asyncio.ensure_future(self._steps.acquire())
            await asyncio.wait({watching, stepping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                assert watching.result()["type"] == "http.disconnect"
                self.cancelled += 1
                stepping.cancel()
                return
            self.sent += 1
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        watching.cancel()


class _Client:
    """One request on its own connection."""

    def __init__(
        self, stack: Any, *, key: str | None = "k", body: bytes = b"{}", path: str = "/complete", owner: str = ""
    ) -> None:
        self.received: list[Message] = []
        self.is_reading = asyncio.Event()
        self.is_reading.set()
        self._left = asyncio.Event()
        parts = [body[start : start + 2] for start in range(0, len(body), 2)]
        self._body = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        self._body[-1]["more_body"] = False
        headers = [(b"authorization", owner.encode())]
        headers += [(b"idempotency-key", key.encode())] if key is not None else []
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        self.task = asyncio.ensure_future(stack(scope, self._receive, self._send))

    @property
    def status(self) -> int:
        return int(self.received[0]["status"])

    @property
    def text(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.received)

    @property
    def is_repeated(self) -> bool:
        return (b"idempotent-replayed", b"true") in self.received[0]["headers"]

    async def leave(self) -> None:
        self._left.set()
        await self.task

    async def _receive(self) -> Message:
        if self._body:
            return self._body.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.is_reading.wait()
        self.received.append(message)


class _Quotas:
    """Allows `left` further requests, and counts the concurrent ones."""

    def __init__(self, left: int = 1000) -> None:
        self.left = left
        self.concurrent = 0

    def check(self, _request: Request) -> None:
        if not self.left:
            raise RateLimitExceeded("no requests are left", 7)

    @contextmanager
    def repeated(self, request: Request) -> Iterator[None]:
        self.check(request)
        self.refused(request)
        self.concurrent += 1
        yield
        self.concurrent -= 1

    def refused(self, _request: Request) -> None:
        self.left -= 1


def _stack(
    app: Any,
    *,
    replay_bytes: int = 100,
    seconds: float = 60.0,
    max_body_bytes: int = 100,
    quotas: _Quotas | None = None,
) -> Any:
    inner = IdempotencyMiddleware(
        app,
        bodies=IncomingBodies(5.0),
        max_body_bytes=max_body_bytes,
        replay_bytes=replay_bytes,
        seconds=seconds,
        quotas=quotas or _Quotas(),
    )
    return RequestLogMiddleware(AuthMiddleware(inner, keys=None, public=()))


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never became true")


@async_test
async def test_request_with_the_key_of_a_running_one_is_refused_until_that_has_ended() -> None:
    app = _Application()
    stack = _stack(app)
    first = _Client(stack)
    app.step()
    await _until(lambda: first.text == b"one")
    second = _Client(stack)
    await second.task
    assert (second.status, b"idempotency_key_in_use" in second.text) == (409, True)
    assert (b"retry-after", b"1") in second.received[0]["headers"]
    app.step()
    await first.task
    third = _Client(stack)
    await third.task
    assert (first.text, third.text, app.bodies) == (b"onetwo", b"onetwo", [b"{}"])
    assert (first.is_repeated, third.is_repeated) == (False, True)


@async_test
async def test_finished_response_is_repeated_for_a_limited_time() -> None:
    app = _Application()
    stack = _stack(app, seconds=0.05)
    app.step(4)
    await _Client(stack).task
    again = _Client(stack)
    await again.task
    assert (again.text, again.is_repeated, len(app.bodies)) == (b"onetwo", True, 1)
    await asyncio.sleep(0.1)
    late = _Client(stack)
    await late.task
    assert (late.text, late.is_repeated, len(app.bodies)) == (b"onetwo", False, 2)


@async_test
async def test_request_whose_client_leaves_is_cancelled_and_may_be_sent_again() -> None:
    app = _Application()
    stack = _stack(app)
    client = _Client(stack)
    app.step()
    await _until(lambda: client.text == b"one")
    await client.leave()
    assert (app.cancelled, len(app.bodies)) == (1, 1)
    app.step(2)
    retry = _Client(stack)
    await retry.task
    assert (retry.text, retry.is_repeated) == (b"onetwo", False)


@async_test
async def test_key_is_bound_to_one_body_and_path() -> None:
    app = _Application()
    stack = _stack(app)
    app.step(8)
    await _Client(stack, body=b"a").task
    other_body = _Client(stack, body=b"b")
    await other_body.task
    assert (other_body.status, b"idempotency_key_reused" in other_body.text) == (400, True)
    for client in (_Client(stack, body=b"a", path="/v1/completions"), _Client(stack, body=b"a", key=None)):
        await client.task
        assert (client.text, client.is_repeated) == (b"onetwo", False)
    assert app.bodies == [b"a", b"a", b"a"]


@async_test
async def test_other_body_under_a_running_key_is_refused_as_such() -> None:
    app = _Application()
    stack = _stack(app)
    first = _Client(stack)
    await _until(lambda: bool(app.bodies))
    other = _Client(stack, body=b"other")
    await other.task
    assert (other.status, b"idempotency_key_reused" in other.text) == (400, True)
    await first.leave()


@async_test
async def test_response_too_long_to_repeat_is_not_kept() -> None:
    app = _Application(parts=(b"x" * 101, b"end"))
    stack = _stack(app)
    app.step(4)
    for _ in range(2):
        client = _Client(stack)
        await client.task
        assert (client.status, client.is_repeated, client.text.endswith(b"end")) == (200, False, True)
    assert len(app.bodies) == 2


@async_test
async def test_long_response_is_repeated_in_parts() -> None:
    app = _Application(parts=(b"x" * 200_000,))
    stack = _stack(app, replay_bytes=1 << 20)
    app.step()
    for _ in range(2):
        client = _Client(stack)
        await client.task
        assert client.text == b"x" * 200_000
    assert client.is_repeated and max(len(message.get("body", b"")) for message in client.received) <= 65536


@async_test
async def test_error_responses_are_not_repeated() -> None:
    app = _Application(status=503)
    stack = _stack(app)
    app.step(4)
    for _ in range(2):
        client = _Client(stack)
        await client.task
        assert (client.status, client.is_repeated) == (503, False)
    assert len(app.bodies) == 2


@async_test
async def test_request_that_failed_may_be_sent_again() -> None:
    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()
        raise RuntimeError("bug")

    stack = _stack(app)
    for _ in range(2):
        client = _Client(stack)
        await client.task
        assert client.status == 500


@async_test
async def test_the_application_waits_for_a_slow_reader() -> None:
    app = _Application(parts=(b"x",) * 50)
    client = _Client(_stack(app))
    await _until(lambda: bool(client.received))
    client.is_reading.clear()
    app.step(50)
    await asyncio.sleep(0.01)
    assert app.sent == 1
    client.is_reading.set()
    await client.task
    assert client.text == b"x" * 50


@async_test
async def test_body_beyond_the_limit_is_refused() -> None:
    app = _Application()
    client = _Client(_stack(app, max_body_bytes=3), body=b"12345678")
    await client.task
    assert app.bodies == [] and b'"code":"body_too_large"' in client.text


@pytest.mark.parametrize("key", ["", "k" * 256])
@async_test
async def test_invalid_key_is_refused(key: str) -> None:
    app = _Application()
    client = _Client(_stack(app), key=key)
    await client.task
    assert (client.status, b"Idempotency-Key" in client.text, app.bodies) == (400, True, [])


async def _responses(stack: Any, app: _Application, owner: str, names: Iterable[int]) -> list[bool]:
    """Sends one request for each name; returns which got the response of an earlier one."""
    clients = []
    for name in names:
        app.step(2)
        clients.append(client := _Client(stack, key=f"k{name}", owner=owner))
        await client.task
    return [client.is_repeated for client in clients]


@async_test
async def test_owner_with_many_responses_evicts_only_its_own() -> None:
    app = _Application()
    stack = _stack(app)
    assert await _responses(stack, app, "victim", range(20)) == [False] * 20
    await _responses(stack, app, "flood", range(600))
    assert await _responses(stack, app, "victim", range(20)) == [True] * 20
    kept = await _responses(stack, app, "flood", range(580, 600))
    assert kept == [True] * 20, "its newest"
    assert await _responses(stack, app, "flood", range(10)) == [False] * 10


@async_test
async def test_repeated_and_refused_requests_count_against_the_quota() -> None:
    app, quotas = _Application(), _Quotas(left=3)
    stack = _stack(app, quotas=quotas)
    first = _Client(stack)
    await _until(lambda: bool(app.bodies))
    for body, status in ((b"{}", 409), (b"other", 400)):
        refused = _Client(stack, body=body)
        await refused.task
        assert refused.status == status
    assert (quotas.left, quotas.concurrent) == (1, 0)
    app.step(2)
    await first.task
    unread = _Client(stack)
    unread.is_reading.clear()
    await _until(lambda: quotas.concurrent == 1)
    unread.is_reading.set()
    await unread.task
    assert (unread.is_repeated, quotas.left, quotas.concurrent) == (True, 0, 0)
    refused = _Client(stack)
    await refused.task
    assert (refused.status, (b"retry-after", b"7") in refused.received[0]["headers"]) == (429, True)
    assert len(app.bodies) == 1
