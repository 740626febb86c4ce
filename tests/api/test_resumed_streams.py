"""Streams whose clients disconnect and return, or pause and go on reading: output is the same, no slot stays in use.

Also access to other tenants' streams, and deadlines.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.completion_client import Event, joined_text, parse_events, stream
from tests.support.http.raw_client import connect, post_request
from tests.support.keyed_server import Keyring, raw_request
from tests.support.load.concurrent_clients import engine_pid
from tests.support.model.tiny_models import tiny_weights
from tests.support.servers import Server, is_clean, running_server, start_server, stop_server
from tests.support.services import Services

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 600, "temperature": 1.0, "seed": 3, "ignore_eos": True}
ENDLESS = {**LONG, "max_tokens": 16_000}
"""Computes for a minute unless it is canceled."""
MANY: dict[str, Any] = {**LONG, "logprobs": 20, "max_tokens": 300}
CHOICES: dict[str, Any] = {**MANY, "n": 3}
ECHO: dict[str, Any] = {**MANY, "prompt": "Once upon a time " * 30, "n": 2, "echo": True}
GUIDED: dict[str, Any] = {**MANY, "max_tokens": 500, "regex": "([a-z]{3,9} )*"}


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """Faults that tests inject into `long_server`."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory, faults: Faults) -> Iterator[Server]:
    """A service whose requests last a second or more."""
    weights = tiny_weights(tmp_path_factory.mktemp("long") / "tiny", context=16_384)
    folder = tmp_path_factory.mktemp("server")
    server = start_server(folder, weights, "--dtype", "float32", environment=faults.environment)
    yield server
    assert stop_server(server) == 0
    assert "Traceback" not in server.log.read_text()


def _first_events(server: Server, count: int, headers: dict[str, str] | None = None, **body: Any) -> list[Event]:
    """Read the first events of a stream, then disconnect."""
    with httpx.stream("POST", f"{server.url}/complete", json=body, headers=headers, timeout=60) as response:
        return _read(response, count)


def _read(response: httpx.Response, count: int) -> list[Event]:
    """Reads `count` events, without those that arrived in one piece with the last of them."""
    text, parts = "", response.iter_text()
    while text.count("\n\n") < count:
        text += next(parts)
    return parse_events("".join(f"{block}\n\n" for block in text.split("\n\n")[:count]))


def _resume(server: Server, name: str, headers: dict[str, str] | None = None, **query: Any) -> httpx.Response:
    return httpx.get(f"{server.url}/complete/{name}/events", headers=headers, params=query, timeout=60)


def _output(events: list[Event]) -> dict[int, tuple[str, list[Any]]]:
    """Text and tokens of each choice."""
    output: dict[int, tuple[str, list[Any]]] = {}
    for event in events:
        if event.name == "token":
            text, tokens = output.get(event.data["index"], ("", []))
            output[event.data["index"]] = (text + event.data["text"], tokens + event.data.get("tokens", []))
    return output


def _assert_same(events: list[Event], expected: list[Event]) -> None:
    assert [event.name for event in events if event.name != "token"] == [
        event.name for event in expected if event.name != "token"
    ]
    assert _output(events) == _output(expected)
    assert events[-1].data["choices"] == expected[-1].data["choices"]
    assert events[-1].data["usage"]["completion_tokens"] == expected[-1].data["usage"]["completion_tokens"]


def test_stream_of_several_choices_survives_repeated_disconnects(long_server: Server) -> None:
    body = {**LONG, "n": 3, "max_tokens": 400, "stop": ["zq"], "logprobs": 2}
    expected = stream(long_server.url, **body)
    events = _first_events(long_server, 20, **body)
    name = events[0].data["id"]
    for _ in range(3):
        after = events[-1].id.rpartition(":")[2]
        with httpx.stream("GET", f"{long_server.url}/complete/{name}/events?after={after}", timeout=60) as response:
            events += _read(response, 101)
    events += parse_events(_resume(long_server, name, after=events[-1].id.rpartition(":")[2]).text)
    _assert_same(events, expected)


def test_second_connection_takes_over_a_running_stream(long_server: Server, faults: Faults) -> None:
    """The fault stops the engine half-way, so the stream still runs when the second connection opens."""
    body = {**LONG, "speculate": False}  # a token a step
    expected = joined_text(stream(long_server.url, **body))
    faults.arm("engine.step", "stop", after=300, times=1)
    with httpx.stream("POST", f"{long_server.url}/complete", json=body, timeout=60) as first:
        parts = first.iter_text()
        text = next(parts)
        url = f"{long_server.url}/complete/{first.headers['x-request-id']}/events"
        assert long_server.wait_for(lambda: not faults.is_armed("engine.step"))
        with httpx.stream("GET", url, timeout=60) as second:
            rest = second.iter_text()
            again = next(rest)
            os.kill(engine_pid(long_server), signal.SIGCONT)
            again += "".join(rest)
        assert joined_text(parse_events(again)) == expected
        text += "".join(parts)
    assert "event: done" not in text, "the second connection did not take the stream over"


def test_stream_belongs_to_the_tenant_that_started_it(long_server: Server) -> None:
    mine, other = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer other"}
    name = _first_events(long_server, 5, mine, **ENDLESS)[0].data["id"]
    for headers in (None, other):
        assert _resume(long_server, name, headers).status_code == 404
        assert httpx.delete(f"{long_server.url}/complete/{name}", headers=headers).status_code == 404
    assert httpx.delete(f"{long_server.url}/complete/{name}", headers=mine).status_code == 200
    events = parse_events(_resume(long_server, name, mine).text)
    assert events[-1].data["choices"][0]["finish_reason"] == "cancelled"


def test_invalid_resume_requests_are_refused(long_server: Server) -> None:
    name = stream(long_server.url, **{**LONG, "max_tokens": 3})[0].data["id"]
    assert _resume(long_server, "req-unknown").status_code == 404
    assert _resume(long_server, name, after=1000).status_code == 400
    assert _resume(long_server, name, after=-2).status_code == 400
    assert _resume(long_server, name, {"Last-Event-ID": "other:3"}).status_code == 400


def test_timings_exclude_the_time_while_disconnected(long_server: Server) -> None:
    began = time.monotonic()
    seen = _first_events(long_server, 40, **LONG)
    assert is_clean(long_server), "the service did not notice the disconnect"
    time.sleep(0.5)
    done = parse_events(_resume(long_server, seen[0].data["id"], after=39).text)[-1].data
    took_ms = (time.monotonic() - began) * 1e3
    rate = done["timings"]["tokens_per_second"]
    assert done["timings"]["decode_ms"] == pytest.approx(599 / rate * 1e3, rel=0.01)
    assert done["timings"]["decode_ms"] < took_ms - 500


def _suspended_connection(server: Server, body: dict[str, Any]) -> socket.socket:
    """A stream whose client does not read, once it is suspended and the engine has no work for it.

    If the event loop gets no CPU for long, most of a stream may arrive at once at a waiting writer, and the service
    does not suspend it: try again.
    """
    before = server.metric("held_streams_total")
    for _ in range(20):
        connection = connect(server, receive_buffer=4096)
        connection.settimeout(60)
        connection.sendall(post_request(body, "/complete", "Connection: close"))
        # After the first token the engine has the request; it is idle once the stream is suspended or finished.
        assert server.wait_for(lambda connection=connection: b"event: token" in connection.recv(4096, socket.MSG_PEEK))
        assert is_clean(server)
        if server.metric("held_streams_total") > before:
            assert server.metric("held_streams_total") == before + 1
            return connection
        connection.close()
    raise AssertionError("no stream was suspended")


def _rest_of(connection: socket.socket) -> list[Event]:
    """Reads the rest of the response, through a larger buffer to be quick."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    response = HTTPResponse(connection)
    response.begin()
    assert response.status == 200
    return parse_events(response.read().decode())


@pytest.mark.parametrize("body", [CHOICES, ECHO, GUIDED], ids=["choices", "echo", "guided"])
def test_suspended_stream_delivers_the_same_events(long_server: Server, body: dict[str, Any]) -> None:
    expected = stream(long_server.url, **body)
    with _suspended_connection(long_server, body) as connection:
        _assert_same(_rest_of(connection), expected)
    assert is_clean(long_server)


def test_suspended_stream_can_be_cancelled_or_resumed(long_server: Server) -> None:
    expected = stream(long_server.url, **CHOICES)
    for action in ("cancel", "resume"):
        with _suspended_connection(long_server, CHOICES) as connection:
            # Only peek: reading resumes the stream, and it could finish before the DELETE arrives.
            head = connection.recv(300, socket.MSG_PEEK)
            name = head.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
            url = f"{long_server.url}/complete/{name}"
            if action == "cancel":
                assert httpx.delete(url).status_code == 200
                choices = _rest_of(connection)[-1].data["choices"]
                assert {choice["finish_reason"] for choice in choices} == {"cancelled"}
                continue
        events = parse_events(httpx.get(f"{url}/events", timeout=60).text)
        _assert_same(events, expected)
    assert is_clean(long_server)


def _counted(server: Server, reason: str) -> float:
    name = rf'inkstream_requests_total\{{finish_reason="{reason}"\}} (\S+)'
    found = re.search(name, httpx.get(f"{server.url}/metrics").text)
    return float(found.group(1)) if found else 0.0


def test_disconnected_client_uses_no_engine_slot_and_may_cancel(long_server: Server) -> None:
    before = _counted(long_server, "cancelled")
    name = _first_events(long_server, 3, **ENDLESS)[0].data["id"]
    assert is_clean(long_server, 30.0)
    assert httpx.delete(f"{long_server.url}/complete/{name}").status_code == 200, "the stream still runs"
    assert parse_events(_resume(long_server, name, after=2).text)[-1].name == "done"
    assert long_server.wait_for(lambda: _counted(long_server, "cancelled") == before + 1)


def test_abandoned_streams_expire_and_are_counted(tmp_path: Path, weights: Path) -> None:
    with running_server(tmp_path, weights, "--resume-seconds", "0.3", fake_ms=20) as server:
        name = _first_events(server, 3, **{**LONG, "max_tokens": 8000})[0].data["id"]
        assert server.wait_for(lambda: _counted(server, "disconnected") == 1)
        assert _resume(server, name, after=3).json()["error"]["code"] == "unknown_request"


def test_queue_timeout_restarts_when_a_stream_is_resumed(tmp_path: Path, weights: Path) -> None:
    with running_server(tmp_path, weights, "--queue-timeout", "3", fake_ms=1) as server:
        seen = _first_events(server, 3, **LONG)
        time.sleep(3.2)
        events = parse_events(_resume(server, seen[0].data["id"], after=2).text)
        assert events[-1].data["choices"][0]["finish_reason"] == "length"


@pytest.fixture(scope="module")
def narrow_server(serve_module: Services) -> Server:
    """Runs one stream at a time and keeps few bytes of it."""
    return serve_module("--max-running", "1", "--resume-bytes", "1000", fake_ms=20)


def test_a_deadline_before_the_first_token_is_an_error(narrow_server: Server) -> None:
    url = narrow_server.url
    with httpx.stream("POST", f"{url}/complete", json={**LONG, "max_tokens": 8000}, timeout=60) as busy:
        parts = busy.iter_text()  # an unreferenced iterator would close the response
        next(parts)
        body = {"prompt": "a", "deadline_ms": 100}
        late = httpx.post(f"{url}/complete", json={**body, "stream": False})
        assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
        assert stream(url, **body)[-1].data["error"]["type"] == "timeout_error"
    assert is_clean(narrow_server, 30.0)


def test_replay_buffer_is_bounded_in_bytes(narrow_server: Server) -> None:
    events = stream(narrow_server.url, **{**LONG, "max_tokens": 40})
    refused = _resume(narrow_server, events[0].data["id"], after=0)
    assert refused.json()["error"]["code"] == "events_gone"


def test_cancelled_stream_ends_with_finish_reason_cancelled(narrow_server: Server) -> None:
    """The completion would take minutes, so it still runs when the DELETE arrives."""
    url, body = narrow_server.url, {**LONG, "max_tokens": 8000}
    with httpx.stream("POST", f"{url}/complete", json=body, timeout=60) as response:
        request_id = response.headers["x-request-id"]
        lines = response.iter_lines()
        while next(lines) != "event: token":
            pass
        answer = httpx.delete(f"{url}/complete/{request_id}")
        rest = list(lines)
    assert answer.json() == {"id": request_id, "cancelled": True}
    done = json.loads(rest[-2].removeprefix("data: "))
    assert done["choices"][0]["finish_reason"] == "cancelled"
    assert done["usage"]["completion_tokens"] < 8000
    assert is_clean(narrow_server, 30.0)
    assert httpx.delete(f"{url}/complete/{request_id}").status_code == 404


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    """Keys with limits."""
    ring = Keyring.of(tmp_path_factory.mktemp("keys") / "keys")
    ring.add("one-at-a-time", concurrency=1)
    ring.add("few-requests", requests_per_minute=4)
    return ring


@pytest.fixture(scope="module")
def limited_server(serve_module: Services, ring: Keyring) -> Server:
    """Keeps all of a stream that is larger than what an unread connection buffers."""
    return serve_module("--resume-bytes", str(8 << 20), ring=ring, fake_ms=1)


def _finished(server: Server, headers: dict[str, str], **body: Any) -> str:
    """The id of a stream that its client has read."""
    response = httpx.post(f"{server.url}/complete", json=body, headers=headers, timeout=60)
    assert "event: done" in response.text
    return response.headers["x-request-id"]


def test_connection_that_reads_a_finished_stream_counts_as_concurrent(limited_server: Server, ring: Keyring) -> None:
    headers = ring.headers("one-at-a-time")
    names = [_finished(limited_server, headers, **{**MANY, "max_tokens": 900}) for _ in range(2)]
    target = f"/complete/{names[0]}/events?after=-1"
    request = raw_request("GET", target, "Host: localhost", *map(": ".join, headers.items()))
    with connect(limited_server, receive_buffer=4096) as unread:
        unread.sendall(request)
        assert unread.recv(20, socket.MSG_PEEK).startswith(b"HTTP/1.1 200")
        refused = _resume(limited_server, names[1], headers, after=-1)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert _resume(limited_server, names[0], headers, after=-1).status_code == 200, "it takes the connection over"
    assert limited_server.wait_for(lambda: _resume(limited_server, names[1], headers, after=-1).status_code == 200)


def test_every_resume_counts_as_a_request(limited_server: Server, ring: Keyring) -> None:
    headers = ring.headers("few-requests")
    name = _finished(limited_server, headers, prompt="a", max_tokens=3)
    statuses = [_resume(limited_server, name, headers).status_code for _ in range(5)]
    assert statuses == [200, 200, 200, 429, 429]


def test_takeover_of_a_running_stream_counts_as_a_request_only(limited_server: Server, ring: Keyring) -> None:
    client = httpx.Client(base_url=limited_server.url, headers=ring.headers("one-at-a-time"), timeout=60)
    opened = list[httpx.Response]()
    with client, ExitStack() as stack:
        first = stack.enter_context(client.stream("POST", "/complete", json={**LONG, "max_tokens": 8000}))
        name = first.headers["x-request-id"]
        for _ in range(3):
            opened.append(stack.enter_context(client.stream("GET", f"/complete/{name}/events")))
        assert [response.status_code for response in opened] == [200] * 3
        assert client.delete(f"/complete/{name}").status_code == 200
