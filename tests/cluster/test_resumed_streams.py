"""Clients of the gateway that resume, duplicate or cancel their streams: real routes, replicas that a test kills."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message

from app.api.resume_store import ResumeStore
from app.cluster.failover_stream import FailoverStream
from app.cluster.gateway import Gateway
from app.cluster.messages import Call, FullResponse, Head
from app.cluster.retry import RetryCounters, RetryingRequest
from app.common.settings import Settings
from app.http import sse
from tests.support.completion_client import parse_events, text_of
from tests.support.scripted_replicas import EVENTS, JSON, START, Lost, Played, Silent, done, event, taken, token

STARTED = (EVENTS, event("start", **START))
UNKNOWN = taken(Head(404, JSON.headers), b'{"error": {}}')
BODY = {"prompt": "Once", "max_tokens": 9}


def client_of(front: Gateway) -> httpx.AsyncClient:
    """Of the front in this process."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://front")


def stream_of(replicas: Played, max_retries: int = 0) -> tuple[FailoverStream, RetryingRequest]:
    """One stream without its front."""
    call = Call(request_id="r", method="POST", path="/complete", query=b"", headers=(), body=b"{}")
    asking = RetryingRequest(replicas, call, RetryCounters(), max_retries=max_retries, accept_timeout=60)
    return FailoverStream(asking, ResumeStore(60), owner="o", replay_bytes=1000), asking


async def events_of(*frames: AsyncGenerator[bytes, None]) -> list[Any]:
    """All remaining events of these streams."""
    return parse_events(b"".join([piece for one in frames async for piece in one]).decode())


async def until(condition: Callable[[], bool]) -> None:
    """Others have their turns until it holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError


def test_who_comes_back_too_soon_does_not_take_the_stream_from_the_front() -> None:
    """The replica that has the stream knows it by the same name: it must not be asked by that name."""
    replicas = Played(taken(*STARTED, token("Once"), done()), UNKNOWN)

    async def visits() -> None:
        async with client_of(Gateway(Settings(), replicas, max_retries=0)) as client:
            await client.post("/complete", json=BODY)
            name = replicas.calls[0].request_id
            assert (await client.get(f"/complete/{name}/events")).status_code == 200
            assert name not in replicas.calls[1].path

    asyncio.run(visits())


@pytest.mark.parametrize(("after", "status"), [("1.0", 400), ("-1", 200), ("1", 200), ("0&after=9", 400)])
def test_a_number_that_only_a_replica_can_read_is_refused(after: str, status: int) -> None:
    replicas = Played(taken(*STARTED, token("Once"), done()), UNKNOWN)

    async def visits() -> None:
        async with client_of(Gateway(Settings(), replicas, max_retries=0)) as client:
            await client.post("/complete", json=BODY)
            response = await client.get(f"/complete/{replicas.calls[0].request_id}/events?after={after}")
            assert response.status_code == status

    asyncio.run(visits())


def test_the_loss_of_an_older_connections_replica_is_no_loss_of_the_stream() -> None:
    late = asyncio.Event()
    replicas = Played(taken(*STARTED, late, Lost), taken(*STARTED, token("Once"), done()))

    async def visits() -> None:
        stream, asking = stream_of(replicas)
        old_frames = stream.frames(stream.attach(), await asking.send())
        await anext(old_frames)
        new_frames = stream.frames(stream.attach(), None)
        await anext(new_frames)
        late.set()
        assert [piece async for piece in old_frames] == []
        assert [one.name for one in await events_of(new_frames)] == ["token", "done"]

    asyncio.run(visits())


def test_a_stream_that_is_stopped_on_its_way_to_another_replica_ends() -> None:
    """Neither the lost replica nor the one that has not started knows the stream."""
    late = asyncio.Event()
    replicas = Played(taken(*STARTED, Lost), taken(late, *STARTED, token("Once"), done()))

    async def visits() -> None:
        stream, asking = stream_of(replicas, max_retries=1)
        frames = stream.frames(stream.attach(), await asking.send())
        await anext(frames)
        rest = asyncio.ensure_future(events_of(frames))
        await until(lambda: len(replicas.calls) == 2)
        assert stream.cancel()
        late.set()
        (end,) = await rest
        assert (end.name, end.data["error"]["code"]) == ("error", "cancelled")
        assert replicas.closed == 2

    asyncio.run(visits())


def test_a_stream_that_a_replica_has_stopped_does_not_go_on_with_another_one() -> None:
    late = asyncio.Event()
    stopped = FullResponse("a", Head(200, JSON.headers), b"{}")
    replicas = Played(taken(*STARTED, late, Lost), taken(*STARTED, token("Once"), done()), all_of=[stopped])

    async def visits() -> None:
        async with client_of(Gateway(Settings(), replicas, max_retries=1)) as client:
            reading = asyncio.ensure_future(client.post("/complete", json=BODY))
            await until(lambda: len(replicas.calls) == 1)
            assert (await client.delete(f"/complete/{replicas.calls[0].request_id}")).json()["cancelled"]
            late.set()
            assert parse_events((await reading).text)[-1].data["error"]["code"] == "cancelled"

    asyncio.run(visits())


def test_who_comes_back_while_there_is_no_room_may_come_back_later() -> None:
    full = taken(
        Head(503, (*JSON.headers, (b"retry-after", b"7"))),
        b'{"error": {"message": "m", "param": null, "code": "full"}}',
    )
    replicas = Played(
        taken(*STARTED, token("On"), Silent),
        UNKNOWN,
        full,
        UNKNOWN,
        [Lost],
        UNKNOWN,
        taken(*STARTED, token("Once"), done()),
    )

    async def visits() -> None:
        async with client_of(Gateway(Settings(), replicas, max_retries=0)) as client:
            reading = asyncio.ensure_future(client.post("/complete", json=BODY))
            await until(lambda: len(replicas.calls) == 1)
            for _ in range(100):  # it has got what there is
                await asyncio.sleep(0)
            reading.cancel()
            await until(lambda: replicas.closed == 1)
            events = f"/complete/{replicas.calls[0].request_id}/events"
            refusals = [await client.get(events) for _ in range(2)]
            assert [(one.status_code, "text/event-stream" in one.headers["content-type"]) for one in refusals] == [
                (503, False)
            ] * 2
            assert refusals[0].json()["error"]["code"] == "full"
            assert refusals[0].headers["retry-after"] == "7"
            assert text_of(parse_events((await client.get(events)).text)) == "Once"

    asyncio.run(visits())


def test_an_error_names_the_stream_and_not_what_another_replica_calls_it() -> None:
    failed = event("error", error={"message": "m", "request_id": "of the replica"})
    replicas = Played(taken(*STARTED, Lost), taken(*STARTED, failed))

    async def visits() -> None:
        async with client_of(Gateway(Settings(), replicas, max_retries=1)) as client:
            events = parse_events((await client.post("/complete", json=BODY)).text)
            assert events[-1].data["error"] == {"message": "m", "request_id": replicas.calls[0].request_id}

    asyncio.run(visits())


def test_events_are_not_deleted() -> None:
    replicas = Played(taken(Head(405, JSON.headers), b"{}"))

    async def visits() -> None:
        async with client_of(Gateway(Settings(), replicas, max_retries=0)) as client:
            assert (await client.delete("/complete/req-1/events")).status_code == 405

    asyncio.run(visits())


def test_pages_of_an_allowed_origin_may_read_what_the_front_says() -> None:
    """Its own errors, and streams that continue."""
    replicas = Played(taken(*STARTED, token("Once"), done()), UNKNOWN)
    front = Gateway(Settings(allow_origin="https://page.example"), replicas, max_retries=0)

    async def visits() -> None:
        async with client_of(front) as client:
            client.headers["origin"] = "https://page.example"
            await client.post("/complete", json=BODY)
            resumed = await client.get(f"/complete/{replicas.calls[0].request_id}/events")
            refused = await client.delete("/complete/req-1")
            for response, status in ((resumed, 200), (refused, 503)):
                assert response.status_code == status
                assert response.headers["access-control-allow-origin"] == "https://page.example"
            preflight = {"access-control-request-method": "POST"}
            assert (await client.options("/complete", headers=preflight)).status_code == 200
            stranger = await client.options("/complete", headers={**preflight, "origin": "https://other.example"})
            assert stranger.status_code == 403

    asyncio.run(visits())


def test_a_text_of_the_other_door_that_had_ended_is_not_lost_afterwards() -> None:
    whole = b'data: {"choices": []}\n\ndata: [DONE]\n\n'
    replicas = Played(taken(EVENTS, whole, Lost))
    front = Gateway(Settings(), replicas, max_retries=0)

    async def visits() -> None:
        async with client_of(front) as client:
            assert (await client.post("/v1/completions", json=BODY)).content == whole

    asyncio.run(visits())


def test_a_body_is_no_more_than_its_bytes_until_another_replica_needs_it() -> None:
    """One that Python reads otherwise than the replica that took it must not break the stream it began."""
    replicas = Played(taken(*STARTED, token("Once"), done()))

    async def visits() -> None:
        async with client_of(Gateway(Settings(), replicas, max_retries=0)) as client:
            events = parse_events((await client.post("/complete", content=b"not for Python")).text)
            assert text_of(events) == "Once"

    asyncio.run(visits())


@pytest.mark.parametrize("path", ["/complete", "/v1/completions"])
def test_whenever_a_visit_is_cancelled_its_replica_is_let_go(path: str) -> None:
    """Ray cancels the work of a client that disconnects, even at the moment a replica starts."""

    async def visit(turns: int) -> bool:
        replicas = Played(taken(*STARTED, token("Once"), Silent))
        front = Gateway(Settings(resume_seconds=0), replicas, max_retries=0)

        async def receive() -> Message:
            if receive_first:
                return receive_first.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        receive_first: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]
        sent: list[Message] = []
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        visiting = asyncio.ensure_future(front(scope, receive, send))
        for _ in range(turns):
            await asyncio.sleep(0)
        visiting.cancel()
        await asyncio.gather(visiting, return_exceptions=True)
        assert replicas.closed == len(replicas.calls) and not front._resume_store._streams, f"after {turns} turns"
        return bool(sent)

    async def visits() -> None:
        assert [await visit(turns) for turns in range(40)][-1], "it never came as far as the answer"

    asyncio.run(visits())


def test_what_the_work_has_made_is_returned_or_discarded_whenever_its_caller_is_cancelled() -> None:
    async def visit(turns: int, disconnect_after: int) -> None:
        made, got, discarded = [], [], []

        async def work() -> str:
            for _ in range(3):
                await asyncio.sleep(0)
            made.append("it")
            return "it"

        async def receive() -> Message:
            for _ in range(disconnect_after):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def discard(what: str) -> None:
            discarded.append(what)

        async def call() -> None:
            if what := await sse.until_disconnect(work(), receive, discard=discard):
                got.append(what)

        calling = asyncio.ensure_future(call())
        for _ in range(turns):
            await asyncio.sleep(0)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        assert made == got + discarded, f"after {turns} turns"

    async def visits() -> None:
        for turns in range(12):
            for disconnect_after in (1, 2, 3, 4, 5, 99):
                await visit(turns, disconnect_after)

    asyncio.run(visits())
