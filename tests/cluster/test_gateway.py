"""Clients of the gateway when a replica is lost or hangs: no effect, or a clean error; never a partial response."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from starlette.types import Message

from app.access.api_keys import add_key, new_key, stored
from app.cluster import gateway as gateway_module
from app.cluster.gateway import Gateway
from app.cluster.messages import Call, FullResponse, Head
from app.common.settings import Settings
from app.http.best_effort import BestEffortTurns
from tests.support.async_test import async_test
from tests.support.completion_client import joined_text, parse_events
from tests.support.scripted_replicas import (
    EVENTS,
    JSON,
    START,
    Lost,
    ScriptedReplicas,
    Silent,
    accepted,
    done,
    event,
    gateway_client,
    token,
    wait_until,
)

BODY = {"prompt": "Once", "max_tokens": 9}
TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=b"}
WORDS = b'data: {"choices": [{"text": "Once"}]}\n\n'
STARTED = (EVENTS, event("start", **START))
WHOLE_STREAM = accepted(*STARTED, token("Once"), done())
NOT_FOUND = Head(404, JSON.headers)
UNKNOWN = accepted(NOT_FOUND, b'{"error": {}}')


async def fetch(
    replicas: ScriptedReplicas,
    path: str,
    method: str = "POST",
    *,
    max_retries: int = 2,
    settings: Any = None,
    **request: Any,
) -> httpx.Response:
    """Sends a request and reads the whole response."""
    async with gateway_client(replicas, max_retries=max_retries, **settings or {}) as client:
        return await asyncio.wait_for(client.request(method, path, **request), 60)


def full(replica: str, head: Head, body: bytes = b"{}") -> FullResponse:
    """A response to a broadcast."""
    return FullResponse(replica, head, body)


async def counted(client: httpx.AsyncClient, replicas: ScriptedReplicas) -> dict[str, float]:
    """The gateway's nonzero counters of lost replicas."""
    replicas._all = [full("a", JSON, b"")]
    found = re.findall(r"^inkstream_relay_(\w+)_total (\S+)$", (await client.get("/metrics")).text, re.MULTILINE)
    return {name: float(count) for name, count in found if float(count)}


def _traces(replicas: ScriptedReplicas) -> list[dict[str, str | None]]:
    """The trace context of each call."""
    return [{name: call.header(name.encode()) for name in TRACE} for call in replicas.calls]


@pytest.mark.parametrize("died", [[], [JSON], [JSON, b'{"half']], ids=["at once", "behind the head", "in the body"])
@async_test
async def test_whole_response_is_requested_again_and_never_mixed(died: list[Any]) -> None:
    replicas = ScriptedReplicas(accepted(*died, Lost), accepted(JSON, b'{"whole": 1}'))
    async with gateway_client(replicas, max_retries=2) as client:
        response = await client.post("/score", json=BODY, headers=TRACE)
        assert (response.status_code, response.json()) == (200, {"whole": 1})
        assert await counted(client, replicas) == {"resent": 1}
    assert replicas.calls[0].body == replicas.calls[1].body
    assert replicas.calls[0].request_id != replicas.calls[1].request_id
    assert _traces(replicas) == [TRACE, TRACE]


@async_test
async def test_stream_that_had_not_started_is_requested_again_unchanged() -> None:
    waiting = event("queue", position=1, eta_ms=9)
    replicas = ScriptedReplicas(
        accepted(EVENTS, waiting, Lost), accepted(EVENTS, waiting, *STARTED[1:], token("Once"), done())
    )
    events = parse_events((await fetch(replicas, "/complete", json=BODY)).text)
    assert [one.name for one in events] == ["queue", "queue", "start", "token", "done"]
    assert [json.loads(call.body) for call in replicas.calls] == [BODY, BODY]


@pytest.mark.parametrize("ending", [[Lost], []], ids=["lost", "ended without a word"])
@async_test
async def test_stream_continues_on_another_replica_with_the_reported_seed(ending: list[Any]) -> None:
    again = accepted(*STARTED, token("Once upon"), token(" a time"), done())
    replicas = ScriptedReplicas(accepted(*STARTED, token("Once "), token("up"), *ending), again)
    async with gateway_client(replicas, max_retries=2) as client:
        response = await client.post("/complete", json={**BODY, "deadline_ms": 60_000}, headers=TRACE)
        assert await counted(client, replicas) == {"replayed": 1}
    events = parse_events(response.text)
    assert joined_text(events) == "Once upon a time"
    assert [one.name for one in events].count("start") == 1
    name = replicas.calls[0].request_id
    assert [one.id for one in events] == [f"{name}:{number}" for number in range(len(events))]
    retried = json.loads(replicas.calls[1].body)
    assert retried.pop("deadline_ms") <= 60_000
    assert retried == {**BODY, "seed": 7}
    assert replicas.calls[1].header(b"content-length") == str(len(replicas.calls[1].body))
    assert _traces(replicas) == [TRACE, TRACE]


@pytest.mark.parametrize(
    ("again", "code"),
    [
        (accepted(EVENTS, event("start", **{**START, "weights_version": "new"})), "replica_lost"),
        (accepted(*STARTED, token("Twice")), "replica_lost"),
        (accepted(Head(429, ()), b'{"error": {"message": "m", "param": null, "code": "full"}}'), "full"),
        (accepted(*STARTED, event("error", error={"message": "m", "request_id": "other", "code": "own"})), "own"),
        (accepted(Lost), None),
    ],
    ids=["other weights", "another text", "refused", "failed", "all are lost"],
)
@async_test
async def test_stream_that_cannot_continue_ends_with_one_error(again: Any, code: str | None) -> None:
    replicas = ScriptedReplicas(accepted(*STARTED, token("Once"), Lost), again, again)
    async with gateway_client(replicas, max_retries=2) as client:
        events = parse_events((await client.post("/complete", json=BODY)).text)
        assert (await counted(client, replicas)).get("failed", 0) == (code != "own")
    assert [one.name for one in events] == ["start", "token", "error"]
    assert events[-1].data["error"]["code"] == code
    assert events[-1].data["error"]["request_id"] == replicas.calls[0].request_id


@pytest.mark.parametrize("max_retries", [0, 2])
@async_test
async def test_request_that_kills_replicas_is_retried_a_bounded_number_of_times(max_retries: int) -> None:
    replicas = ScriptedReplicas(*[accepted(Lost)] * 9)
    response = await fetch(replicas, "/complete", json=BODY, max_retries=max_retries)
    assert response.status_code == 503 and response.headers["retry-after"]
    assert response.json()["error"]["type"] == "unavailable_error"
    assert len(replicas.calls) == max_retries + 1


@pytest.mark.parametrize("before", [[], [EVENTS], [EVENTS, b": ping\n"]])
@async_test
async def test_openai_stream_is_requested_again_until_it_has_text(before: list[Any]) -> None:
    replicas = ScriptedReplicas(accepted(*before, Lost), accepted(EVENTS, WORDS, b"data: [DONE]\n\n", Lost))
    text = (await fetch(replicas, "/v1/completions", json=BODY)).text
    assert text.removeprefix(": ping\n") == WORDS.decode() + "data: [DONE]\n\n"


@pytest.mark.parametrize("ending", [[Lost], []], ids=["lost", "ended without a word"])
@async_test
async def test_openai_stream_with_text_ends_with_an_error(ending: list[Any]) -> None:
    replicas = ScriptedReplicas(accepted(EVENTS, WORDS, *ending), accepted(EVENTS, WORDS))
    *sent, error, end, nothing = (await fetch(replicas, "/v1/completions", json=BODY)).text.split("\n\n")
    assert ["\n\n".join(sent).encode() + b"\n\n", end, nothing] == [WORDS, "data: [DONE]", ""]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert len(replicas.calls) == 1


@async_test
async def test_body_is_not_parsed_until_another_replica_needs_it() -> None:
    """A body that Python parses differently from the replica must not break the stream that the replica started."""
    events = parse_events((await fetch(ScriptedReplicas(WHOLE_STREAM), "/complete", content=b"not for Python")).text)
    assert joined_text(events) == "Once"


@pytest.mark.parametrize(("method", "path"), [("GET", "/health/ready"), ("POST", "/complete")])
@async_test
async def test_no_client_waits_forever_for_a_replica(monkeypatch: pytest.MonkeyPatch, method: str, path: str) -> None:
    monkeypatch.setattr(gateway_module, "_ATTEMPT_SECONDS", 0.01)
    response = await fetch(ScriptedReplicas(*[[Silent]] * 4), path, method, settings={"queue_timeout": 0.01})
    assert response.status_code == 503


@pytest.mark.parametrize(
    "hung", [[Silent], accepted(Silent), accepted(JSON, b"{", Silent)], ids=["at once", "taken", "half"]
)
@async_test
async def test_health_is_answered_by_another_replica_if_one_hangs(monkeypatch: pytest.MonkeyPatch, hung: Any) -> None:
    class Hangs(asyncio.Event):
        """Raises the time-out once the first replica hangs, so that on a busy machine no other replica times out."""

        async def wait(self) -> Literal[True]:
            monkeypatch.setattr(gateway_module, "_ATTEMPT_SECONDS", 60.0)
            return await super().wait()

    monkeypatch.setattr(gateway_module, "_ATTEMPT_SECONDS", 0.02)
    hung = [Hangs() if part is Silent else part for part in hung]
    response = await fetch(ScriptedReplicas(hung, accepted(JSON, b'{"status": "ready"}')), "/health/ready", "GET")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})


async def disconnect_after(client: httpx.AsyncClient, replicas: ScriptedReplicas, count: int) -> bytes:
    """Disconnects from /complete after `count` pieces of the body; returns what arrived."""
    got: list[bytes] = []
    disconnected = asyncio.Event()
    requests: list[Message] = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]

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
    await client._transport.app(scope, receive, send)  # type: ignore[attr-defined]
    assert replicas.closed == len(replicas.calls)
    return b"".join(got)


@async_test
async def test_disconnect_stops_the_replica_and_the_client_may_resume() -> None:
    again = accepted(*STARTED, token("Once upon"), done())
    replicas = ScriptedReplicas(accepted(*STARTED, token("Once "), Silent), UNKNOWN, UNKNOWN, again, UNKNOWN)
    async with gateway_client(replicas) as client:
        seen = parse_events((await disconnect_after(client, replicas, 2)).decode())
        path = f"/complete/{replicas.calls[0].request_id}/events"
        assert (await client.get(path, headers={"authorization": "Bearer other"})).status_code == 404
        rest = parse_events((await client.get(path, headers={"last-event-id": seen[0].id})).text)
        assert [one.name for one in rest] == ["token", "token", "done"]
        assert joined_text(rest) == "Once upon"
        assert [one.id for one in rest] == [f"{replicas.calls[0].request_id}:{number}" for number in (1, 2, 3)]
        assert (await client.get(path, params={"after": 9})).status_code == 400


@async_test
async def test_a_stream_has_the_callers_own_id_too() -> None:
    replicas = ScriptedReplicas(WHOLE_STREAM, UNKNOWN)
    async with gateway_client(replicas) as client:
        await client.post("/complete", json=BODY, headers={"x-request-id": "mine"})
        headers = {"x-request-id": "again", "last-event-id": f"{replicas.calls[0].request_id}:0"}
        resumed = await client.get("/complete/mine/events", headers=headers)
        assert (resumed.status_code, resumed.headers["x-request-id"]) == (200, "again")
        assert [one.name for one in parse_events(resumed.text)] == ["token", "done"]


@async_test
async def test_however_a_client_spells_its_key_it_owns_the_same_streams() -> None:
    replicas = ScriptedReplicas(WHOLE_STREAM, UNKNOWN, UNKNOWN)
    async with gateway_client(replicas) as client:
        await client.post("/complete", json=BODY, headers={"authorization": "Bearer ink-a"})
        path = f"/complete/{replicas.calls[0].request_id}/events"
        resumed = await client.get(path, headers={"authorization": "bearer  ink-a\t"})
        assert resumed.status_code == 200 and joined_text(parse_events(resumed.text)) == "Once"
        assert (await client.get(path, headers={"authorization": "Bearer ink-A"})).status_code == 404


@async_test
async def test_client_that_resumes_without_capacity_may_retry_later() -> None:
    error = b'{"error": {"message": "m", "param": null, "code": "full"}}'
    busy = accepted(Head(503, (*JSON.headers, (b"retry-after", b"7"))), error)
    replicas = ScriptedReplicas(
        accepted(*STARTED, token("On"), Silent), UNKNOWN, busy, UNKNOWN, [Lost], UNKNOWN, WHOLE_STREAM
    )
    async with gateway_client(replicas) as client:
        await disconnect_after(client, replicas, 2)
        events = f"/complete/{replicas.calls[0].request_id}/events"
        refusals = [await client.get(events) for _ in range(2)]
        assert [one.status_code for one in refusals] == [503] * 2
        assert not any("text/event-stream" in one.headers["content-type"] for one in refusals)
        assert refusals[0].json()["error"]["code"] == "full" and refusals[0].headers["retry-after"] == "7"
        assert joined_text(parse_events((await client.get(events)).text)) == "Once"


@async_test
async def test_a_replica_decides_who_may_resume() -> None:
    """The resume request has a different name; the replica finds the stream by the original one."""
    replicas = ScriptedReplicas(
        accepted(*STARTED, Silent), accepted(Head(401, JSON.headers), b'{"error": {"code": "x"}}')
    )
    async with gateway_client(replicas) as client:
        await disconnect_after(client, replicas, 1)
        name = replicas.calls[0].request_id
        assert (await client.get(f"/complete/{name}/events")).status_code == 401
        assert name not in replicas.calls[1].path


@pytest.mark.parametrize(("after", "status"), [("1.0", 400), ("-1", 200), ("1", 200), ("0&after=9", 400)])
@async_test
async def test_event_number_of_a_resume_is_validated(after: str, status: int) -> None:
    replicas = ScriptedReplicas(WHOLE_STREAM, UNKNOWN)
    async with gateway_client(replicas) as client:
        await client.post("/complete", json=BODY)
        response = await client.get(f"/complete/{replicas.calls[0].request_id}/events?after={after}")
        assert response.status_code == status


@pytest.mark.parametrize("status", [200, 404])
@async_test
async def test_stream_is_cancelled_by_its_original_name_on_any_replica(status: int) -> None:
    """404: no replica has the stream at the moment, because its client is disconnected."""
    answer = full("a", Head(status, JSON.headers), b'{"id": "of the replica"}')
    replicas = ScriptedReplicas(
        accepted(*STARTED, Lost), accepted(*STARTED, token("Once"), Silent), UNKNOWN, all_of=[answer]
    )
    async with gateway_client(replicas, max_retries=2) as client:
        await disconnect_after(client, replicas, 2)
        first, second = replicas.calls
        response = await client.delete(f"/complete/{first.request_id}")
        assert response.json() == {"id": first.request_id, "cancelled": True}
        assert replicas.calls_of_all[0].path == f"/complete/{second.request_id}"
        if status == 404:
            rest = parse_events((await client.get(f"/complete/{first.request_id}/events")).text)
            assert (rest[-1].name, rest[-1].data["error"]["code"]) == ("error", "cancelled")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short time-out for hanging replicas; on a busy machine a response may still take more than 50 ms."""
    monkeypatch.setattr(gateway_module, "_BROADCAST_SECONDS", 0.5)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("all_of", [[full("a", JSON)], [Silent, full("a", NOT_FOUND)]], ids=["stopped", "hangs"])
@async_test
async def test_cancelled_stream_does_not_continue_on_another_replica(all_of: list[Any]) -> None:
    late = asyncio.Event()
    replicas = ScriptedReplicas(accepted(*STARTED, token("Once"), late, Lost), WHOLE_STREAM, all_of=all_of)
    async with gateway_client(replicas, max_retries=9) as client:
        reading = asyncio.ensure_future(client.post("/complete", json=BODY))
        await wait_until(lambda: len(replicas.calls) == 1)
        name = replicas.calls[0].request_id
        assert (await client.delete(f"/complete/{name}")).json() == {"id": name, "cancelled": True}
        late.set()
        assert parse_events((await reading).text)[-1].data["error"]["code"] == "cancelled"
        replicas._all = [full("a", NOT_FOUND)]
        assert (await client.delete(f"/complete/{name}")).status_code == 404, "the stream has ended"
    assert len(replicas.calls) == 1


@pytest.mark.parametrize(
    ("statuses", "seconds", "expected"),
    [
        ([404, 200], 3600.0, 200),
        ([401, 401], 3600.0, 401),
        ([404, 404], 3600.0, 404),
        ([Silent, 404, 200], 3600.0, 200),  # immediately
        ([404, Lost], 3600.0, 404),
        ([404, Silent], 0.05, 503),  # the hanging replica may have it
        ([Silent, Lost], 0.05, 503),
        ([], 3600.0, 503),
    ],
)
@async_test
async def test_completion_is_cancelled_by_the_replica_that_has_it(
    monkeypatch: pytest.MonkeyPatch, statuses: Sequence[Any], seconds: float, expected: int
) -> None:
    monkeypatch.setattr(gateway_module, "_BROADCAST_SECONDS", seconds)
    responses = [full("a", Head(one, JSON.headers)) if isinstance(one, int) else one for one in statuses]
    response = await fetch(ScriptedReplicas(all_of=responses), "/complete/req-1", "DELETE")
    assert response.status_code == expected
    assert ("retry-after" in response.headers) == (expected == 503)


_OF, _SILENT = "inkstream_relay_replica_answers", "inkstream_relay_silent_replicas"


@pytest.mark.usefixtures("impatient")
@async_test
async def test_metrics_merge_responding_replicas_and_report_hanging_ones() -> None:
    replicas, page = ScriptedReplicas(), b'# HELP a_total What.\n# TYPE a_total counter\na_total{b="c"} 1\n'
    async with gateway_client(replicas) as client:

        async def reported(*responses: Any) -> set[str]:
            replicas._all = list(responses)
            merged = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
            assert merged.headers["content-type"].startswith("text/plain"), "the format that the gateway can merge"
            assert replicas.calls_of_all[-1].header(b"accept") is None
            lines = merged.text.splitlines()
            assert lines.count("# TYPE a_total counter") == 1 and "inkstream_relay_resent_total 0.0" in lines
            return {line for line in lines if line.startswith(("a_total", "inkstream_relay_s", _OF))}

        def of(name: str) -> set[str]:
            return {f'a_total{{b="c",server="{name}"}} 1.0', f'{_OF}{{server="{name}"}} 1.0'}

        one, two, three = (full(name, JSON, page) for name in ("one", "two", "three"))
        assert await reported(one, two) == of("one") | of("two") | {_SILENT + " 0.0"}
        assert await reported(one, Silent) == of("one") | {_OF + '{server="two"} 0.0', _SILENT + " 1.0"}
        assert await reported(one, Lost) == of("one") | {_SILENT + " 0.0"}
        assert await reported(one, three) == of("one") | of("three") | {_SILENT + " 0.0"}
        replicas._all = [Silent]
        assert (await client.get("/metrics")).status_code == 503


class _KeyedReplicas(ScriptedReplicas):
    """Each key sees a metric with its own name only."""

    def broadcast(self, call: Call) -> list[asyncio.Task[FullResponse]]:
        key = (call.header(b"authorization") or "").removeprefix("Bearer ")
        page = f'# TYPE inkstream_key_requests_total counter\ninkstream_key_requests_total{{key="{key}"}} 1\n'
        self._all = [full("one", JSON, page.encode())]
        return super().broadcast(call)


@async_test
async def test_concurrent_scrapes_with_two_keys_each_get_what_their_key_may_see(tmp_path: Path) -> None:
    keys = [new_key(), new_key()]
    for name, key in zip("ab", keys, strict=True):
        add_key(tmp_path / "keys.json", stored(key, name))
    async with gateway_client(_KeyedReplicas(), keys_file=tmp_path / "keys.json") as client:
        headers = [{"authorization": f"Bearer {key}"} for key in keys]
        pages = await asyncio.gather(*(client.get("/metrics", headers=each) for each in headers))
    assert [re.findall(r'key_requests_total{key="([^"]+)"', page.text) for page in pages] == [[key] for key in keys]


@async_test
async def test_without_a_key_no_body_is_read_and_only_health_reaches_a_replica(tmp_path: Path) -> None:
    """With a key, a body is read only as far as a replica needs it to refuse it."""
    good, n_read = new_key(), 0
    add_key(tmp_path / "keys.json", stored(good, "ann"))

    async def endless() -> AsyncIterator[bytes]:
        nonlocal n_read
        while True:
            n_read += 100
            yield b"x" * 100

    replicas = ScriptedReplicas(accepted(JSON, b"{}"), accepted(Head(413, ()), b"{}"))
    async with gateway_client(replicas, keys_file=tmp_path / "keys.json", max_body_bytes=2000) as client:
        for headers in ({}, {"authorization": "Bearer ink-unknown"}):
            assert (await client.post("/complete", content=endless(), headers=headers)).status_code == 401
        assert (await client.get("/v1/models")).status_code == 401
        assert not n_read and not replicas.calls
        assert (await client.request("GET", "/health/ready", content=b"x" * 10_000)).status_code == 200
        headers = {"authorization": f"Bearer {good}"}
        assert (await client.post("/complete", content=endless(), headers=headers)).status_code == 413
    assert [len(call.body) for call in replicas.calls] == [0, 2001] and n_read < 3000


@pytest.mark.parametrize("is_declared", [True, False])
@async_test
async def test_bodies_that_are_arriving_take_limited_memory(is_declared: bool) -> None:
    n_bytes, stays_open = 0, asyncio.Event()

    async def unfinished() -> AsyncIterator[bytes]:
        nonlocal n_bytes
        for _ in range(99):
            n_bytes += 10_000
            yield b"x" * 10_000
        await stays_open.wait()

    async with gateway_client(ScriptedReplicas(), max_body_bytes=1 << 20) as client:
        headers = {"content-length": "1000000"} if is_declared else {}
        posts = [
            asyncio.create_task(client.post("/complete", content=unfinished(), headers=headers)) for _ in range(100)
        ]
        for _ in range(100):
            done, _others = await asyncio.wait(posts, timeout=0.1)
            if len(done) >= 100 - 32 - 32:
                break
        refused = [post.result() for post in posts if post.done()]
        assert len(refused) >= 100 - 32 - 32 and {one.status_code for one in refused} == {429}
        assert all(int(one.headers["retry-after"]) > 0 for one in refused)
        assert n_bytes <= (33 << 20)
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)


@async_test
async def test_allowed_origins_may_read_the_responses_of_the_gateway() -> None:
    """Covers the gateway's own errors and resumed streams."""
    replicas, page = ScriptedReplicas(WHOLE_STREAM, UNKNOWN), "https://page.example"
    async with gateway_client(replicas, allow_origin=page) as client:
        client.headers["origin"] = page
        await client.post("/complete", json=BODY)
        resumed = await client.get(f"/complete/{replicas.calls[0].request_id}/events")
        refused = await client.delete("/complete/req-1")
        assert [resumed.status_code, refused.status_code] == [200, 503]
        assert {one.headers["access-control-allow-origin"] for one in (resumed, refused)} == {page}
        preflight = {"access-control-request-method": "POST"}
        assert (await client.options("/complete", headers=preflight)).status_code == 200
        stranger = await client.options("/complete", headers={**preflight, "origin": "https://other.example"})
        assert stranger.status_code == 403


@async_test
async def test_work_without_a_key_is_limited_while_the_gateway_runs_a_request() -> None:
    turns = BestEffortTurns()
    replicas = ScriptedReplicas(accepted(*STARTED, Silent))
    gateway = Gateway(Settings(resume_seconds=0), replicas, max_retries=0, best_effort=turns)
    requests: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Message:
        if not requests:
            await asyncio.Event().wait()
        return requests.pop()

    async def send(_message: Message) -> None:
        pass

    scope = {"type": "http", "method": "POST", "path": "/complete", "query_string": b"", "headers": []}
    running = asyncio.ensure_future(gateway(scope, receive, send))
    await wait_until(lambda: bool(replicas.calls))
    turns.charge(1.0)
    assert turns.is_exhausted
    running.cancel()
    await asyncio.wait([running])
    assert not turns.is_exhausted


@pytest.mark.parametrize("path", ["/complete", "/v1/completions"])
@async_test
async def test_cancelling_a_request_at_any_point_releases_its_replica(path: str) -> None:
    """Ray cancels the work of a client that disconnects, even at the moment a replica starts."""

    async def cancel_after(turns: int) -> bool:
        replicas = ScriptedReplicas(accepted(*STARTED, token("Once"), Silent))
        gateway = Gateway(Settings(resume_seconds=0), replicas, max_retries=0)
        requests: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if not requests:
                await asyncio.Event().wait()
            return requests.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        visiting = asyncio.ensure_future(gateway(scope, receive, send))
        for _ in range(turns):
            await asyncio.sleep(0)
        visiting.cancel()
        await asyncio.gather(visiting, return_exceptions=True)
        assert replicas.closed == len(replicas.calls) and not gateway._resume_store._streams, f"after {turns} turns"
        return bool(sent)

    assert [await cancel_after(turns) for turns in range(40)][-1], "no turn reached the response"
