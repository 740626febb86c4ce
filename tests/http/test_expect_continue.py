"""Expect: 100-continue: the interim response is sent at most once, and never after the connection has ended."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from app.http.http_protocol import HttpProtocol
from tests.support.http.framing_harness import LIMITS, Harness, Served

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
HEAD = b"POST /complete HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LENGTH = HEAD + b"Content-Length: 5\r\n\r\n"
FIN = b""
BAD_CHUNK = b"zz\r\n"
TOO_LONG = b"0\r\nX: %b\r\n\r\n" % (b"y" * 20_000)
SLOW = dataclasses.replace(LIMITS, body_seconds=0.02)


class _Application:
    """Reads the body when the test releases it."""

    def __init__(self, *, reads_at_once: bool) -> None:
        self._may_read = asyncio.Event()
        if reads_at_once:
            self._may_read.set()

    async def before_reading(self) -> None:
        await self._may_read.wait()

    async def release(self, _connection: HttpProtocol) -> None:
        self._may_read.set()

    async def release_late(self, _connection: HttpProtocol) -> None:
        await asyncio.sleep(0.1)
        self._may_read.set()

    async def release_after_reset(self, connection: HttpProtocol) -> None:
        connection.transport.abort()
        connection.connection_lost(ConnectionResetError())
        self._may_read.set()


def _serve(
    packets: tuple[bytes, ...],
    *,
    reads_at_once: bool,
    then: Callable[[_Application], Callable[[HttpProtocol], Awaitable[None]]] = lambda application: application.release,
) -> Served:
    async def run() -> Served:
        application = _Application(reads_at_once=reads_at_once)
        with Harness(limits=SLOW, before_reading=application.before_reading) as harness:
            return await harness.serve(packets, then=then(application))

    return uvloop.run(run())


@pytest.mark.parametrize("reads_at_once", [True, False], ids=["asks first", "asks later"])
@pytest.mark.parametrize(
    ("packets", "statuses"),
    [
        ((CHUNKED + BAD_CHUNK,), [400]),
        ((CHUNKED, BAD_CHUNK), [400]),
        ((CHUNKED, b"5\r\nhello\r\n", BAD_CHUNK), [400]),
        ((CHUNKED, TOO_LONG), [431]),
        ((CHUNKED + TOO_LONG,), [431]),
        ((LENGTH, FIN), []),
        ((LENGTH + b"he", FIN), []),
        ((CHUNKED, FIN), []),
    ],
)
def test_no_interim_response_follows_a_refusal_or_the_end_of_the_connection(
    packets: tuple[bytes, ...], statuses: list[int], reads_at_once: bool
) -> None:
    result = _serve(packets, reads_at_once=reads_at_once)
    assert (result.statuses, result.is_closed, result.log) == (statuses, True, [])
    reads_in_time = reads_at_once and len(packets) > 1
    assert result.output.count(INTERIM) == reads_in_time


@pytest.mark.parametrize("reads_at_once", [True, False], ids=["asks first", "asks later"])
def test_body_that_never_arrives_gets_only_a_408(reads_at_once: bool) -> None:
    result = _serve((LENGTH,), reads_at_once=reads_at_once, then=lambda application: application.release_late)
    assert (result.statuses, result.is_closed, result.log) == ([408], True, [])
    assert result.output.count(INTERIM) == reads_at_once


def test_application_that_reads_after_a_reset_writes_nothing() -> None:
    result = _serve((LENGTH,), reads_at_once=False, then=lambda application: application.release_after_reset)
    assert (bytes(result.output), result.log) == (b"", [])


@pytest.mark.parametrize(
    ("packets", "reads_at_once", "interim"),
    [
        ((LENGTH, b"hello"), True, 1),
        ((LENGTH, b"hello"), False, 0),  # the body arrived without it
        ((LENGTH + b"hello",), True, 0),
        ((LENGTH.replace(b"1.1", b"1.0"), b"hello"), True, 0),  # RFC 9110, 10.1.1
    ],
)
def test_interim_response_is_sent_only_if_useful(packets: tuple[bytes, ...], reads_at_once: bool, interim: int) -> None:
    result = _serve(packets, reads_at_once=reads_at_once)
    assert result.output.count(INTERIM) == interim
    assert set(result.statuses) == {200} and not result.log
