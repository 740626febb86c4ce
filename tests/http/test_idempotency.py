"""Requests with an Idempotency-Key: refused while the first one runs, repeated after its end, computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.http.auth import AuthMiddleware
from app.http.idempotency import IdempotencyMiddleware
from app.http.request_log import RequestLogMiddleware
from app.http.sse import until_disconnect
from tests.support.async_test import async_test


class _Application:
    """Answers with `parts`, after each of which it waits for `step`; counts its calls."""

    def __init__(self, *parts: bytes, status: int = 200) -> None:
        self.bodies: list[bytes] = []
        self._parts, self._status = parts or (b"one", b"two"), status
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
        await send({"type": "http.response.start", "status": self._status, "headers": []})
        for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            if await until_disconnect(self._steps.acquire(), receive) is None:
                return
        await send({"type": "http.response.body", "body": b""})


class _Client:
    """One request on a connection of its own."""

    def __init__(self, stack: Any, *, key: str | None = "k", body: bytes = b"{}", path: str = "/complete") -> None:
        self.received: list[Message] = []
        self._left = asyncio.Event()
        parts = [body[start : start + 2] for start in range(0, len(body), 2)]
        self._body = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        self._body[-1]["more_body"] = False
        headers = [(b"idempotency-key", key.encode())] if key is not None else []
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
        self.received.append(message)


def _stack(app: Any, *, replay_bytes: int = 100, seconds: float = 60.0, max_body_bytes: int = 100) -> Any:
    inner = IdempotencyMiddleware(app, max_body_bytes=max_body_bytes, replay_bytes=replay_bytes, seconds=seconds)
    return RequestLogMiddleware(AuthMiddleware(inner, keys=None, public=()))


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not happen")


@async_test
async def test_a_second_request_is_refused_while_the_first_one_runs() -> None:
    app = _Application()
    stack = _stack(app)
    first = _Client(stack)
    await _until(lambda: first.text == b"one")
    second = _Client(stack)
    await second.task
    assert (second.status, b"idempotency_key_in_use" in second.text) == (409, True)
    app.step(2)
    await first.task
    assert (first.text, first.is_repeated, app.bodies) == (b"onetwo", False, [b"{}"])


@async_test
async def test_a_finished_response_is_repeated_for_a_while_only() -> None:
    app = _Application()
    stack = _stack(app, seconds=0.1)
    app.step(4)
    await _Client(stack).task
    again = _Client(stack)
    await again.task
    assert (again.text, again.is_repeated, len(app.bodies)) == (b"onetwo", True, 1)
    await asyncio.sleep(0.15)
    late = _Client(stack)
    await late.task
    assert (late.text, late.is_repeated, len(app.bodies)) == (b"onetwo", False, 2)


@async_test
async def test_the_key_starts_anew_after_a_connection_that_closed_too_early() -> None:
    app = _Application()
    stack = _stack(app)
    first = _Client(stack)
    await _until(lambda: first.text == b"one")
    await first.leave()
    app.step(2)
    retry = _Client(stack)
    await retry.task
    assert (retry.text, retry.is_repeated, len(app.bodies)) == (b"onetwo", False, 2)


@async_test
async def test_a_key_belongs_to_one_body_one_path_and_to_requests_that_send_it() -> None:
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


@pytest.mark.parametrize("app", [_Application(b"x" * 101), _Application(status=503)], ids=["too long", "error"])
@async_test
async def test_a_response_that_is_too_long_or_an_error_is_not_kept(app: _Application) -> None:
    app.step(4)
    stack = _stack(app)
    for n in (1, 2):
        client = _Client(stack)
        await client.task
        assert (client.is_repeated, len(app.bodies)) == (False, n)


@async_test
async def test_a_failure_is_an_error_and_starts_the_key_anew() -> None:
    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        await receive()
        raise RuntimeError("bug")

    stack = _stack(app)
    for _ in range(2):
        client = _Client(stack)
        await client.task
        assert client.status == 500


@async_test
async def test_at_most_256_responses_are_kept_and_the_oldest_goes_first() -> None:
    app = _Application()
    stack = _stack(app)
    app.step(2 * 258)
    is_repeated = []
    for n in (*range(257), 256, 0):
        client = _Client(stack, key=str(n))
        await client.task
        is_repeated.append(client.is_repeated)
    assert is_repeated == [*[False] * 257, True, False]


@async_test
async def test_a_body_beyond_the_limit_goes_to_the_application_whole() -> None:
    app = _Application()
    app.step(2)
    client = _Client(_stack(app, max_body_bytes=3), body=b"12345678")
    await client.task
    assert (app.bodies, client.text) == ([b"12345678"], b"onetwo")


@pytest.mark.parametrize("key", ["", "k" * 256])
@async_test
async def test_a_bad_key_is_refused(key: str) -> None:
    app = _Application()
    client = _Client(_stack(app), key=key)
    await client.task
    assert (client.status, b"Idempotency-Key" in client.text, app.bodies) == (400, True, [])
