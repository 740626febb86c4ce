"""Clients of the gateway when a replica is lost: no effect, or a clean error; never half an answer."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from app.access.api_keys import add_key, new_key, stored
from app.api.resume_store import ResumeStore
from app.cluster import asgi_adapter
from app.cluster import gateway as front_module
from app.cluster.failover_stream import FailoverStream, with_heartbeat
from app.cluster.gateway import Gateway
from app.cluster.messages import Accepted, Call, FullResponse, Head
from app.cluster.retry import RetryCounters, RetryingRequest
from app.common.settings import Settings
from tests.support.completion_client import parse_events, text_of
from tests.support.scripted_replicas import EVENTS, JSON, START, Lost, Played, Silent, done, event, taken, token

BODY = {"prompt": "Once", "max_tokens": 9}
WORDS = b'data: {"choices": [{"text": "Once"}]}\n\n'


def front_of(replicas: Played, max_retries: int = 2, **settings: Any) -> Gateway:
    """A front before played replicas."""
    return Gateway(Settings(**settings), replicas, max_retries=max_retries)


def fetch(front: Gateway, path: str, method: str = "POST", **request: Any) -> httpx.Response:
    """One request, read to the end of its answer."""

    async def visit() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://front") as client:
            response = await client.request(method, path, **request)
        # At once, not at the next garbage collection: a replica would compute until then.
        assert isinstance(front._replicas, Played)
        assert front._replicas.closed == len(front._replicas.calls)
        return response

    return asyncio.run(visit())


def counted(front: Gateway) -> dict[str, float]:
    """What the front has counted."""
    return {
        name: front._counts.registry.get_sample_value(f"inkstream_relay_{name}_total") or 0
        for name in ("resent", "replayed", "failed")
    }


@pytest.mark.parametrize("died", [[], [JSON], [JSON, b'{"half']], ids=["at once", "behind the head", "in the body"])
def test_a_whole_answer_is_asked_for_again_and_never_mixed(died: list[Any]) -> None:
    replicas = Played(taken(*died, Lost), taken(JSON, b'{"whole": 1}'))
    front = front_of(replicas)
    response = fetch(front, "/score", json=BODY)
    assert (response.status_code, response.json()) == (200, {"whole": 1})
    assert replicas.calls[0].body == replicas.calls[1].body
    assert replicas.calls[0].request_id != replicas.calls[1].request_id
    assert counted(front) == {"resent": 1, "replayed": 0, "failed": 0}
    assert replicas.closed == 2


def test_a_stream_that_had_not_begun_is_asked_for_again_as_it_was() -> None:
    waiting = event("queue", position=1, eta_ms=9)
    again = taken(EVENTS, waiting, event("start", **START), token("Once"), done())
    replicas = Played(taken(EVENTS, waiting, Lost), again)
    front = front_of(replicas)
    events = parse_events(fetch(front, "/complete", json=BODY).text)
    assert [one.name for one in events] == ["queue", "queue", "start", "token", "done"]
    assert [json.loads(call.body) for call in replicas.calls] == [BODY, BODY]
    assert counted(front) == {"resent": 1, "replayed": 0, "failed": 0}


@pytest.mark.parametrize("ending", [[Lost], []], ids=["lost", "ended without a word"])
def test_a_stream_goes_on_with_another_replica_from_the_seed_that_was_told(ending: list[Any]) -> None:
    started = taken(EVENTS, event("start", **START), token("Once "), token("up"), *ending)
    again = taken(EVENTS, event("start", **START), token("Once upon"), token(" a time"), done())
    replicas = Played(started, again)
    front = front_of(replicas)
    response = fetch(front, "/complete", json={**BODY, "deadline_ms": 60_000})
    events = parse_events(response.text)
    assert text_of(events) == "Once upon a time"
    assert [one.name for one in events].count("start") == 1
    name = replicas.calls[0].request_id
    assert [one.id for one in events] == [f"{name}:{number}" for number in range(len(events))]
    retried = json.loads(replicas.calls[1].body)
    assert retried.pop("deadline_ms") <= 60_000
    assert retried == {**BODY, "seed": 7}
    assert replicas.calls[1].header(b"content-length") == str(len(replicas.calls[1].body))
    assert counted(front) == {"resent": 0, "replayed": 1, "failed": 0}


@pytest.mark.parametrize(
    ("again", "code"),
    [
        (taken(EVENTS, event("start", **{**START, "weights_version": "new"})), "replica_lost"),
        (taken(EVENTS, event("start", **START), token("Twice")), "replica_lost"),
        (taken(Head(429, ()), b'{"error": {"message": "m", "param": null, "code": "full"}}'), "full"),
        (taken(Lost), None),
    ],
    ids=["other weights", "another text", "refused", "all are lost"],
)
def test_a_stream_that_cannot_go_on_ends_with_one_error(again: Any, code: str | None) -> None:
    replicas = Played(taken(EVENTS, event("start", **START), token("Once"), Lost), again, again)
    front = front_of(replicas)
    response = fetch(front, "/complete", json=BODY)
    events = parse_events(response.text)
    assert [one.name for one in events] == ["start", "token", "error"]
    assert events[-1].data["error"]["code"] == code
    assert events[-1].data["error"]["request_id"] == replicas.calls[0].request_id
    assert counted(front)["failed"] == 1
    assert replicas.closed == len(replicas.calls)


@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_a_request_that_replicas_die_with_is_not_sent_for_ever(max_retries: int) -> None:
    replicas = Played(*[taken(Lost)] * 9)
    front = front_of(replicas, max_retries)
    response = fetch(front, "/complete", json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["type"] == "unavailable_error"
    assert len(replicas.calls) == max_retries + 1
    assert counted(front) == {"resent": max_retries, "replayed": 0, "failed": 1}


@pytest.mark.parametrize("before", [[], [EVENTS], [EVENTS, b": ping\n"]])
def test_a_stream_of_the_other_door_is_asked_for_again_until_something_was_said(before: list[Any]) -> None:
    replicas = Played(taken(*before, Lost), taken(EVENTS, WORDS, b"data: [DONE]\n\n"))
    text = fetch(front_of(replicas), "/v1/completions", json=BODY).text
    assert text.removeprefix(": ping\n") == WORDS.decode() + "data: [DONE]\n\n"


@pytest.mark.parametrize("ending", [[Lost], []], ids=["lost", "ended without a word"])
def test_a_stream_of_the_other_door_that_had_begun_ends_with_an_error(ending: list[Any]) -> None:
    replicas = Played(taken(EVENTS, WORDS, *ending), taken(EVENTS, WORDS))
    front = front_of(replicas)
    *sent, error, end, nothing = fetch(front, "/v1/completions", json=BODY).text.split("\n\n")
    assert ["\n\n".join(sent).encode() + b"\n\n", end, nothing] == [WORDS, "data: [DONE]", ""]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(replicas.calls) == 1
    assert counted(front)["failed"] == 1


def test_no_client_waits_forever_for_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "_ATTEMPT_SECONDS", 0.01)
    replicas = Played(*[[Silent]] * 4)
    front = front_of(replicas, queue_timeout=0.01)
    for method, path in (("GET", "/health/ready"), ("POST", "/complete")):
        assert fetch(front, path, method).status_code == 503
    assert replicas.closed == 4


@pytest.mark.parametrize("hung", [[Silent], taken(Silent), taken(JSON, b"{", Silent)], ids=["at once", "taken", "half"])
def test_health_is_answered_by_another_replica_where_one_hangs(monkeypatch: pytest.MonkeyPatch, hung: Any) -> None:
    class Hangs(asyncio.Event):
        """Raises the timeout once the first replica hangs, so that on a busy machine no other replica times out."""

        async def wait(self) -> Literal[True]:
            monkeypatch.setattr(front_module, "_ATTEMPT_SECONDS", 60.0)
            return await super().wait()

    monkeypatch.setattr(front_module, "_ATTEMPT_SECONDS", 0.02)
    hung = [Hangs() if part is Silent else part for part in hung]
    replicas = Played(hung, taken(JSON, b'{"status": "ready"}'))
    response = fetch(front_of(replicas), "/health/ready", "GET")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})


async def _disconnect_after(front: Gateway, count: int) -> list[bytes]:
    """Disconnect from /complete after `count` pieces of the body; return what arrived."""
    got: list[bytes] = []
    disconnected = asyncio.Event()
    requests = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            got.append(message["body"])
            if len(got) == count:
                disconnected.set()

    scope = {"type": "http", "method": "POST", "path": "/complete", "query_string": b"", "headers": []}
    await front(scope, receive, send)
    return got


def test_a_client_that_leaves_stops_its_replica_and_may_come_back() -> None:
    started = taken(EVENTS, event("start", **START), token("Once "), Silent)
    unknown = taken(Head(404, JSON.headers), b'{"error": {}}')
    again = taken(EVENTS, event("start", **START), token("Once upon"), done())
    replicas = Played(started, unknown, unknown, again, unknown)
    front = front_of(replicas)

    async def visits() -> None:
        seen = parse_events(b"".join(await _disconnect_after(front, 2)).decode())
        assert replicas.closed == 1
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://front") as client:
            path = f"/complete/{replicas.calls[0].request_id}/events"
            assert (await client.get(path, headers={"authorization": "Bearer other"})).status_code == 404
            rest = parse_events((await client.get(path, headers={"last-event-id": seen[0].id})).text)
            assert [one.name for one in rest] == ["token", "token", "done"]
            assert text_of(rest) == "Once upon"
            assert [one.id for one in rest] == [f"{replicas.calls[0].request_id}:{number}" for number in (1, 2, 3)]
            late = await client.get(path, params={"after": 9})
            assert late.status_code == 400

    asyncio.run(visits())


def test_a_newer_connection_takes_a_stream_over_and_the_older_one_does_no_harm() -> None:
    late = asyncio.Event()
    started = taken(EVENTS, event("start", **START), late, token("Once upon a time"), done())
    again = taken(EVENTS, event("start", **START), token("Once upon "), token("a time"), done())
    replicas = Played(started, again)

    async def visits() -> None:
        call = Call(request_id="r", method="POST", path="/complete", query=b"", headers=(), body=b"{}")
        asking = RetryingRequest(replicas, call, RetryCounters(), max_retries=0, accept_timeout=60)
        store = ResumeStore(0)  # a stream that no connection reads is gone at once
        stream = FailoverStream(asking, store, owner="o", replay_bytes=1000)
        old = stream.attach()
        old_frames = stream.frames(old, await asking.send())
        assert "event: start" in (await anext(old_frames)).decode()
        new = stream.attach()
        new_frames = stream.frames(new, None)
        seen = [await anext(new_frames), await anext(new_frames)]
        late.set()
        assert [frame async for frame in old_frames] == []
        stream.detach(old)
        assert store.find("r", "o") is stream
        seen += [frame async for frame in new_frames]
        assert text_of(parse_events(b"".join(seen).decode())) == "Once upon a time"
        stream.detach(new)
        assert store.find("r", "o") is None
        assert replicas.closed == 2

    asyncio.run(visits())


def test_an_application_stops_when_its_answer_is_no_longer_wanted() -> None:
    ended = []

    async def app(_scope: Scope, receive: Receive, send: Send) -> None:
        try:
            assert (await receive())["body"] == b"{}"
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for piece in (b"a", b"b"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await receive()
        finally:
            ended.append(True)

    async def visit() -> None:
        call = Call(request_id="r", method="POST", path="/", query=b"", headers=(), body=b"{}")
        async with aclosing(asgi_adapter.stream_response(app, call, "me")) as parts:
            assert [await anext(parts) for _ in range(3)] == [Accepted("me"), Head(200, ()), b"ab"]
        assert ended

    asyncio.run(visit())


def test_who_may_resume_is_for_a_replica_to_say() -> None:
    replicas = Played(
        taken(EVENTS, event("start", **START), Silent), taken(Head(401, JSON.headers), b'{"error": {"code": "x"}}')
    )
    front = front_of(replicas)

    async def visits() -> None:
        await _disconnect_after(front, 1)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://front") as client:
            response = await client.get(f"/complete/{replicas.calls[0].request_id}/events")
            assert response.status_code == 401

    asyncio.run(visits())


@pytest.mark.parametrize("status", [200, 404])
def test_a_stream_is_stopped_by_its_own_name_wherever_it_is(status: int) -> None:
    """404: no replica has it at the moment, for its client is away."""
    started = taken(EVENTS, event("start", **START), Lost)
    unknown = taken(Head(404, JSON.headers), b'{"error": {}}')
    answer = FullResponse("a", Head(status, JSON.headers), b'{"id": "of the replica"}')
    replicas = Played(started, taken(EVENTS, event("start", **START), token("Once"), Silent), unknown, all_of=[answer])
    front = front_of(replicas)

    async def visits() -> None:
        await _disconnect_after(front, 2)
        first, second = replicas.calls
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://front") as client:
            response = await client.delete(f"/complete/{first.request_id}")
            assert response.json() == {"id": first.request_id, "cancelled": True}
            assert replicas.calls_of_all[0].path == f"/complete/{second.request_id}"
            if status == 404:
                rest = parse_events((await client.get(f"/complete/{first.request_id}/events")).text)
                assert (rest[-1].name, rest[-1].data["error"]["code"]) == ("error", "cancelled")

    asyncio.run(visits())


@pytest.mark.parametrize(("statuses", "expected"), [([404, 200], 200), ([401, 401], 401), ([404, 404], 404)])
def test_a_completion_is_stopped_by_whichever_replica_has_it(statuses: list[int], expected: int) -> None:
    answers = [FullResponse(str(index), Head(status, JSON.headers), b"{}") for index, status in enumerate(statuses)]
    assert fetch(front_of(Played(all_of=answers)), "/complete/req-1", "DELETE").status_code == expected
    assert fetch(front_of(Played()), "/complete/req-1", "DELETE").status_code == 503


def test_metrics_are_those_of_all_and_the_fronts_own() -> None:
    page = '# HELP a_total What.\n# TYPE a_total counter\na_total{b="c"} %d\n'
    answers = [FullResponse(name, JSON, (page % number).encode()) for name, number in (("x", 1), ("y", 2))]
    lines = fetch(front_of(Played(all_of=answers)), "/metrics", "GET").text.splitlines()
    assert 'a_total{b="c",server="x"} 1.0' in lines
    assert 'a_total{b="c",server="y"} 2.0' in lines
    assert lines.count("# TYPE a_total counter") == 1
    assert "inkstream_relay_resent_total 0.0" in lines


def test_a_body_is_read_as_far_as_a_replica_needs_it_to_refuse_it() -> None:
    replicas = Played(taken(Head(413, ()), b"{}"))
    assert fetch(front_of(replicas, max_body_bytes=2000), "/complete", content=b"x" * 10_000).status_code == 413
    assert len(replicas.calls[0].body) == 2001


def test_a_silence_is_filled() -> None:
    async def gather() -> list[bytes]:
        resume, frames = asyncio.Event(), list[bytes]()

        async def slow() -> Any:
            yield b"a"
            await resume.wait()
            yield b"b"

        async for frame in with_heartbeat(slow(), 0.01):
            frames.append(frame)
            if len(frames) == 4:
                resume.set()
        return frames

    frames = asyncio.run(gather())
    assert frames[0] == b"a"
    assert frames[-1] == b"b"
    assert set(frames[1:-1]) == {b": ping\n\n"}


@pytest.mark.parametrize("key", [None, "unknown", "good"])
def test_no_byte_is_read_of_a_body_whose_sender_has_no_key(tmp_path: Path, key: str | None) -> None:
    """The gateway also sends it to no replica."""
    good = new_key()
    add_key(tmp_path / "keys.json", stored(good, "ann"))
    read: list[str] = []
    answers: list[int] = []

    async def receive() -> Message:
        read.append("piece")
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def send(message: Message) -> None:
        answers.append(message.get("status", 0))

    async def visit() -> None:
        replicas = Played(taken(Head(413, ()), b"{}"))
        front = front_of(replicas, keys_file=tmp_path / "keys.json", max_body_bytes=2000)
        sent = {None: None, "unknown": "ink-unknown", "good": good}[key]
        headers = [(b"authorization", f"Bearer {sent}".encode())] if sent else []
        scope = {"type": "http", "method": "POST", "path": "/complete", "query_string": b"", "headers": headers}
        await front(scope, receive, send)
        assert bool(read) == bool(replicas.calls) == (key == "good")
        assert answers[0] == (413 if key == "good" else 401)

    asyncio.run(visit())


def test_a_stranger_may_ask_for_health_and_sends_no_body_with_it(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.json", stored(new_key(), "ann"))
    replicas = Played(taken(JSON, b"{}"))
    front = front_of(replicas, keys_file=tmp_path / "keys.json")
    assert fetch(front, "/health/ready", "GET", content=b"x" * 10_000).status_code == 200
    assert replicas.calls[0].body == b""
    assert fetch(front, "/v1/models", "GET").status_code == 401
