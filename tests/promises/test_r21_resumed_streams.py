"""A stream can be resumed: cut after any event and at any byte, it continues without a gap or a repetition.

Cut: the client loses its connection after a number of events or bytes, resumes from its last complete event, and
loses the connection once more.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from tests.support.completion_client import Event, joined_text, parse_events, stream
from tests.support.load.concurrent_clients import is_ready, kill_engine
from tests.support.promise_figures import Promise
from tests.support.servers import Server, is_clean
from tests.support.services import Services
from tests.support.trials import Trials

_BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "temperature": 1.0}
_CONCURRENCY = 8


@pytest.fixture(scope="module")
def server(serve_module: Services) -> Server:
    """A fake engine, quick enough for hundreds of streams."""
    return serve_module(fake_ms=3)


def _whole_events(received: bytes) -> list[Event]:
    """Complete events of the bytes that a client received; the rest is lost."""
    whole, mark, _ = received.decode("ascii").rpartition("\n\n")
    return parse_events(whole + mark) if mark else []


async def _receive(
    client: httpx.AsyncClient, request: httpx.Request, *, n_events: int = 0, n_bytes: int = 0
) -> tuple[str, list[Event]]:
    """The request ID and the complete events up to the limit; all events without a limit."""
    response = await client.send(request, stream=True)
    assert response.status_code == 200, await response.aread()
    received = b""
    try:
        async for part in response.aiter_raw():
            received += part
            if n_events and received.count(b"\n\n") >= n_events:
                received = b"".join(event + b"\n\n" for event in received.split(b"\n\n")[:n_events])
                break
            if n_bytes and len(received) >= n_bytes:
                received = received[:n_bytes]
                break
    finally:
        await response.aclose()
    return response.headers["x-request-id"], _whole_events(received)


async def _resume(client: httpx.AsyncClient, name: str, events: list[Event], **cut: int) -> list[Event]:
    headers = {"Last-Event-ID": events[-1].id} if events else {}
    request = client.build_request("GET", f"/complete/{name}/events", headers=headers)
    return [*events, *(await _receive(client, request, **cut))[1]]


async def _cut_and_resume(client: httpx.AsyncClient, seed: int, **cut: int) -> list[Event]:
    """All events of a stream that is cut once, and again after it resumes."""
    request = client.build_request("POST", "/complete", json={**_BODY, "seed": seed})
    name, events = await _receive(client, request, **cut)
    if not (events and events[-1].name == "done"):
        events = await _resume(client, name, events, n_events=3)
    if events[-1].name != "done":
        events = await _resume(client, name, events)
    return events


def _outcome(events: list[Event]) -> dict[str, Any]:
    """Numbers of the events, how they end, and the text."""
    numbers = [int(event.id.rpartition(":")[2]) for event in events]
    ends = [event.name for event in events if event.name in ("done", "error")]
    return {"numbers": numbers, "ends": ends, "text": joined_text(events)}


def _whole(events: list[Event], expected: str) -> dict[str, Any]:
    return {"numbers": list(range(len(events))), "ends": ["done"], "text": expected}


def _is_whole(events: list[Event], expected: str) -> bool:
    return _outcome(events) == _whole(events, expected)


def _compare(trials: Trials, server: Server, events: list[Event], expected: str, seed: int) -> None:
    name = events[0].id.rpartition(":")[0] if events else ""
    trials.compare(_whole(events, expected), _outcome(events), seed=seed, request_id=name, log=server.log)


async def _cut_all(server: Server, cuts: list[tuple[int, dict[str, int]]]) -> list[list[Event]]:
    gate = asyncio.Semaphore(_CONCURRENCY)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def one(seed: int, cut: dict[str, int]) -> list[Event]:
            async with gate:
                return await _cut_and_resume(client, seed, **cut)

        return await asyncio.gather(*(one(seed, cut) for seed, cut in cuts))


def test_streams_cut_anywhere_can_be_completed(server: Server, promise: Promise) -> None:
    rng, n_seeds = random.Random(21), 8
    expected = [stream(server.url, **_BODY, seed=seed) for seed in range(n_seeds)]
    n_cuts = promise.size(80, 500)
    n_ordered = n_cuts * 5 // 8
    cuts = [{"n_events": 1 + n % 50} for n in range(n_ordered)]
    cuts += [{"n_bytes": rng.randrange(1, 6000)} for _ in range(n_cuts - n_ordered)]
    plan = [(number % n_seeds, cut) for number, cut in enumerate(cuts)]
    streams = asyncio.run(_cut_all(server, plan))
    trials = Trials()
    for (seed, _), events in zip(plan, streams, strict=True):
        _compare(trials, server, events, joined_text(expected[seed]), seed)
    assert is_clean(server, 30.0)
    promise.all_of("streams complete after lost connections", trials)


def test_gaps_and_repetitions_are_detected(server: Server) -> None:
    """Positive control: wrong event numbers give a gap or a repetition."""
    events = stream(server.url, **_BODY, seed=1)
    assert _is_whole(events, joined_text(events))
    assert not _is_whole([*events[:10], *events[11:]], joined_text(events))
    assert not _is_whole([*events[:10], *events[9:]], joined_text(events))
    assert not _is_whole(events[:-1], joined_text(events))


def test_stream_survives_losing_client_and_engine(server: Server, promise: Promise) -> None:
    """The client is disconnected when the engine dies, and reconnects before the next one is ready."""
    n = promise.size(2, 20)
    body = {**_BODY, "max_tokens": 400}
    expected = joined_text(stream(server.url, **body, seed=5))

    async def send_all() -> Trials:
        trials = Trials()
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for _ in range(n):
                request = client.build_request("POST", "/complete", json={**body, "seed": 5})
                name, events = await _receive(client, request, n_events=10)
                kill_engine(server)
                _compare(trials, server, await _resume(client, name, events), expected, seed=5)
                assert server.wait_for(lambda: is_ready(server), 30)
        return trials

    promise.all_of("streams complete after losing connection and engine", asyncio.run(send_all()))
