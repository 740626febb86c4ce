"""Requests with an Idempotency-Key: they join the first one while it runs, its response is repeated after its end."""

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
        self.joined(request)
        self.concurrent += 1
        yield
        self.concurrent -= 1

    def joined(self, _request: Request) -> None:
        if not self.left:
            raise RateLimitExceeded("no requests are left", 7)
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
async def test_requests_with_one_key_are_computed_once_and_get_the_same_bytes() -> None:
    app = _Application()
    stack = _stack(app)
    first = _Client(stack)
    app.step()
    await _until(lambda: first.text == b"one")
    second = _Client(stack)
    await _until(lambda: len(second.received) == 2)
    assert second.text == b"one", "it joins at the start of the response, not at its end"
    app.step()
    await asyncio.gather(first.task, second.task)
    assert (first.text, second.text, app.bodies) == (b"onetwo", b"onetwo", [b"{}"])
    assert (first.is_repeated, second.is_repeated) == (False, True)


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
async def test_application_is_cancelled_only_when_the_last_connection_closes() -> None:
    app = _Application()
    stack = _stack(app)
    clients = [_Client(stack), _Client(stack)]
    app.step()
    await _until(lambda: all(client.text == b"one" for client in clients))
    await clients[0].leave()
    assert app.cancelled == 0
    await clients[1].leave()
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
async def test_response_too_long_to_repeat_refuses_later_requests_while_it_runs() -> None:
    app = _Application(parts=(b"x" * 101, b"end"))
    stack = _stack(app)
    first = _Client(stack)
    app.step()
    await _until(lambda: len(first.text) == 101)
    second = _Client(stack)
    await second.task
    assert (second.status, b"idempotency_key_in_use" in second.text) == (409, True)
    app.step()
    await first.task
    assert first.text.endswith(b"end")
    app.step(2)
    third = _Client(stack)
    await third.task
    assert (third.status, third.is_repeated, len(app.bodies)) == (200, False, 2)


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
async def test_every_connection_gets_a_failure() -> None:
    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()
        await asyncio.sleep(0.01)
        raise RuntimeError("bug")

    stack = _stack(app)
    clients = [_Client(stack), _Client(stack)]
    await asyncio.gather(*(client.task for client in clients))
    assert [client.status for client in clients] == [500, 500]


@async_test
async def test_stalled_connection_does_not_block_another() -> None:
    app = _Application(parts=(b"x" * 60,) * 50)
    stack = _stack(app, replay_bytes=100)
    slow, fast = _Client(stack), _Client(stack)
    await _until(lambda: bool(slow.received and fast.received))
    slow.is_reading.clear()
    app.step(50)
    await fast.task
    assert len(fast.text) == 60 * 50
    slow.is_reading.set()
    await slow.task
    assert slow.text.strip(b"x") == b"" and len(slow.text) < 60 * 50, "incomplete, because the rest is no longer kept"


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
async def test_owner_whose_streams_are_cut_evicts_only_its_own() -> None:
    app = _NativeStream()
    stack = _stack(app)
    for owner, number in (("victim", 5), ("flood", 600)):
        for name in range(number):
            client = _Client(stack, key=f"k{name}", owner=owner)
            await _until(lambda client=client: bool(client.received))
            await client.leave()
    app.calls.clear()
    for owner in ("victim", "flood"):
        client = _Client(stack, key="k0", owner=owner)
        await _until(lambda client=client: bool(client.received))
        await client.leave()
    assert app.calls == [("GET", "/complete/req-0/events"), ("POST", "/complete")]


class _NativeStream:
    """Streams without end; a resumption is refused with `refusal`, if that is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.refusal = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.calls.append((scope["method"], scope["path"]))
        await receive()
        if self.refusal and scope["method"] == "GET":
            await send({"type": "http.response.start", "status": self.refusal, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        name = f"req-{len(self.calls) - 1}".encode()
        headers = [(b"content-type", b"text/event-stream"), (b"x-request-id", name)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await receive()


@pytest.mark.parametrize("status", [429, 503])
@async_test
async def test_cut_stream_whose_resumption_is_refused_for_now_can_be_resumed_later(status: int) -> None:
    app = _NativeStream()
    stack = _stack(app)
    client = _Client(stack)
    await _until(lambda: bool(client.received))
    await client.leave()
    app.refusal = status
    refused = _Client(stack)
    await refused.task
    assert refused.status == status
    app.refusal = 0
    client = _Client(stack)
    await _until(lambda: bool(client.received))
    await client.leave()
    assert app.calls[1:] == [("GET", "/complete/req-0/events")] * 2


@async_test
async def test_repeated_and_joined_requests_count_against_the_quota() -> None:
    app, quotas = _Application(), _Quotas(left=2)
    stack = _stack(app, quotas=quotas)
    first, joined = _Client(stack), _Client(stack)
    await _until(lambda: bool(first.received and joined.received))
    assert (quotas.left, quotas.concurrent) == (1, 0), "only the request that joined"
    app.step(2)
    await asyncio.gather(first.task, joined.task)
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
