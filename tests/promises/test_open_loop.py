"""The open-loop load generator of the promises: requests go out on time, independent of earlier answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.load.open_loop import Outcome, Plan, offer, summary

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]

_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_BUSY = b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nbusy"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _offered(answer: Answer, **plan: float) -> tuple[list[Outcome], list[float]]:
    """The generator's report on a server with these answers, and the arrival time of each request."""
    arrivals: list[float] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0]))
                arrivals.append(asyncio.get_running_loop().time())
                await answer(reader, writer, len(arrivals))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def scene() -> list[Outcome]:
        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        outcomes = await offer(Plan(url=f"http://{host}:{port}", bodies=(b'{"seed": SEED}',), **plan))  # type: ignore[arg-type]
        server.close()
        await asyncio.sleep(0.05)  # the server sees that connections were cut
        return outcomes

    return asyncio.run(scene()), arrivals


async def _never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:  # noqa: ARG001
    await reader.read()


async def _stream_or_refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:  # noqa: ARG001
    if number % 2:
        writer.write(_BUSY)
        return
    writer.write(_STREAM)
    token = _chunk(b"id: a:1\nevent: token\ndata: {}\n\n")
    for part in (token[:15], token[15:], token, _chunk(b"id: a:3\nevent: done\ndata: {}\n\n"), b"0\r\n\r\n"):
        writer.write(part)
        await asyncio.sleep(0.01)


async def _break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:  # noqa: ARG001
    writer.write(_STREAM + _chunk(b"id: a:1\nevent: token\ndata: {}\n\n"))
    if number % 2:
        writer.write(b"0\r\n\r\n")
    else:
        writer.close()


def test_arrivals_do_not_wait_for_answers() -> None:
    for patience in (0.1, 3.0, 3.0):  # without a free core, requests go out late and arrive late
        outcomes, arrivals = _offered(_never, rate=200, seconds=0.5, patience=patience)
        if len(arrivals) == 100 and summary(outcomes).late.p50 < 0.2:
            break
    assert len(arrivals) == len(outcomes) == 100
    assert outcomes[-1].due - outcomes[0].due == pytest.approx(99 / 200)
    assert summary(outcomes).late.p50 < 0.2
    assert {o.error for o in outcomes} == {"cut"}
    assert not any(o.is_good for o in outcomes)


def test_tokens_refusals_and_ends_are_told_apart() -> None:
    outcomes, _ = _offered(_stream_or_refuse, rate=50, seconds=0.4)
    result = summary(outcomes)
    assert (result.offered, result.good, result.refused, result.errors) == (20, 10, 10, {})
    assert {o.retry_after for o in outcomes if o.is_refused} == {7}
    good = [o for o in outcomes if o.is_good]
    assert {o.tokens for o in good} == {2}
    assert all(len(o.gaps) == 1 and o.first_byte and o.first_token and o.end for o in good)
    assert all(o.end - o.first_token >= 0.02 for o in good if o.end and o.first_token)


def test_a_stream_that_breaks_off_is_not_good() -> None:
    result = summary(_offered(_break_off, rate=50, seconds=0.2)[0])
    assert result.good == 0
    assert result.errors == {"the stream ended without done": 5, "the connection closed in mid-response": 5}
