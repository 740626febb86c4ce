"""R3: Clients that are slow to send headers, a body or the next request, or to read an answer, lose their connection;
a request that waits longer than --queue-timeout gets an error, and one that leaves the queue is never computed.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.http.raw_client import (
    STREAM,
    connect,
    error_of,
    get_request,
    post_request,
    read_all,
    read_response,
    reset,
    send_slowly,
    status_of,
)
from tests.support.promise_figures import Promise
from tests.support.servers import Server, is_clean
from tests.support.services import Services

HEAD, BODY, IDLE, WRITE = 0.5, 0.7, 0.9, 0.6
FLAGS = ["--head-timeout", HEAD, "--body-timeout", BODY, "--keep-alive-timeout", IDLE, "--write-timeout", WRITE]
LATE = 1.0
"""Tolerance in seconds on a busy machine."""


@pytest.fixture(scope="module")
def impatient(serve_module: Services) -> Server:
    """A service with short time-outs."""
    return serve_module(*map(str, FLAGS), fake_ms=2)


@dataclass(frozen=True, slots=True)
class _Cut:
    """How long a connection was kept, and what was said on it. The deadline began within the deed.

    Who measures may have no core for a moment, so there are two times, and the true one is between them.
    """

    at_most: float
    """Seconds since before the deed that the deadline counts from."""
    at_least: float
    """Seconds since after it."""
    said: bytes


def _cut_after(server: Server, *, rest: float | None = None, first: bytes = b"", slowly: bytes = b"") -> _Cut:
    """A client that was answered and rested, or has just connected, sends this, and then one byte after the other."""
    before = time.monotonic()
    with connect(server) as connection:
        if rest is not None:
            connection.sendall(get_request())
            assert status_of(read_response(connection)) == 200
            time.sleep(rest)
        if first:
            before = time.monotonic()
            connection.sendall(first)
        after = time.monotonic()
        said = send_slowly(connection, slowly, 0.03) if slowly else read_all(connection)
        now = time.monotonic()
    return _Cut(now - before, now - after, said)


_BODY = post_request({"prompt": "x" * 1000})
CASES: dict[str, tuple[dict[str, Any], float, str | None]] = {
    "nothing": ({}, HEAD, None),
    "half a head": ({"first": get_request()[:20]}, HEAD, "head_timeout"),
    "a slow head": ({"first": b"G", "slowly": (get_request() * 10)[1:]}, HEAD, "head_timeout"),
    "half a body": ({"first": post_request(STREAM)[:-5]}, BODY, "body_timeout"),
    "a slow body": ({"first": _BODY[:200], "slowly": _BODY[200:]}, BODY, "body_timeout"),
    "no second request": ({"rest": 0.0}, IDLE, None),
    "a slow second head": ({"rest": IDLE / 2, "first": get_request()[:20]}, HEAD, "head_timeout"),
}


def test_each_deadline_for_the_sender_is_kept_and_told(impatient: Server, promise: Promise) -> None:
    late = []
    for name, (case, due, code) in CASES.items():
        # A client that sends too late, because it got no core, was disconnected before that: such a run does not count.
        cut = promise.measured(
            lambda case=case: _cut_after(impatient, **case),  # type: ignore[misc]
            lambda cut, due=due, code=code: cut.at_least <= due + LATE and status_of(cut.said) == (408 if code else 0),
        )
        assert cut.at_most > due - 0.1, (name, "too early")
        late.append(cut.at_least - due)
        if code:
            assert status_of(cut.said) == 408, (name, cut.said)
            assert error_of(cut.said)["code"] == code
        else:
            assert cut.said == b"", name
    promise.at_most(
        "slow sender disconnected after its deadline", max(late), target=0.1, floor=LATE, unit="s", n=len(late)
    )


def test_a_reader_that_stops_is_cut_and_may_come_back(impatient: Server, promise: Promise) -> None:
    before = _cut(impatient, "write_stalled")
    with connect(impatient, receive_buffer=4096) as connection:
        began = time.monotonic()
        connection.sendall(post_request(STREAM))
        assert impatient.wait_for(lambda: _cut(impatient, "write_stalled") > before, 60)
        seconds = time.monotonic() - began
        assert seconds > WRITE
        said = read_all(connection)
    name = said.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
    assert impatient.wait_for(lambda: impatient.metric("requests_running") == 0)
    with connect(impatient) as connection:
        connection.sendall(get_request(f"/complete/{name}/events", "Connection: close"))
        again = read_all(connection)
    assert again.count(b"event: token") > 1000 and again.count(b"event: done") == 1
    promise.all_of("stalled readers that are disconnected and can resume", 1, 1)


def _cut(server: Server, reason: str) -> float:
    return server.metric(f'connections_cut_total{{reason="{reason}"}}')


def _read_slowly(server: Server) -> bytes:
    got = b""
    with connect(server, receive_buffer=4096) as connection, suppress(ConnectionError):
        connection.sendall(post_request({**STREAM, "max_tokens": 600}, "/complete", "Connection: close"))
        while part := connection.recv(2048):
            got += part
            time.sleep(0.05)  # 40 KB/s at most, and the stream makes as much
    return got


def test_a_slow_reader_that_reads_is_not_cut(impatient: Server, promise: Promise) -> None:
    # A reader that gets no core for 0.6 s has stopped reading, and is cut as it should be.
    def measure() -> tuple[bytes, float]:
        before = _cut(impatient, "write_stalled")
        return _read_slowly(impatient), _cut(impatient, "write_stalled") - before

    got, n_cut = promise.measured(measure, lambda found: not found[1])
    assert b"event: done" in got
    assert n_cut == 0


def test_pipelined_requests_do_not_pile_up(impatient: Server) -> None:
    with connect(impatient) as connection:
        connection.sendall(post_request({**STREAM, "max_tokens": 100}) + get_request() * 5000)
        said = read_all(connection)
    assert said.count(b"HTTP/1.1 200 OK") == 1 and b"event: done" in said
    with connect(impatient) as connection:  # one after the other is no pile
        for _ in range(50):
            connection.sendall(get_request())
            assert status_of(read_response(connection)) == 200


def test_a_post_of_a_client_that_has_finished_sending_is_that_of_one_that_has_left(impatient: Server) -> None:
    with connect(impatient) as connection:
        connection.sendall(post_request({**STREAM, "max_tokens": 8000, "stream": False}))  # 16 s
        assert impatient.wait_for(lambda: impatient.metric("requests_running") == 1)
        connection.shutdown(1)
        assert impatient.wait_for(lambda: impatient.metric("requests_running") == 0, 10)


_QUEUE_SECONDS = 1.0
_HOLDER: dict[str, Any] = {"prompt": "hold", "max_tokens": 8000, "ignore_eos": True}
_ONE_SLOT = ("--max-running", "1", "--resume-seconds", "0", "--queue-timeout")


@pytest.fixture(scope="module")
def narrow(serve_module: Services) -> Server:
    """One slot, for which requests wait as long as they like."""
    return serve_module(*_ONE_SLOT, "600", fake_ms=5)


def _started(server: Server) -> float:
    """How many requests have begun: only what began has its time in the queue counted."""
    return server.metric("queue_duration_seconds_count")


def _send(server: Server, **body: Any) -> socket.socket:
    connection = connect(server)
    connection.sendall(post_request(body))
    return connection


def _post(server: Server, **body: Any) -> tuple[int, float, httpx.Response]:
    start = time.monotonic()
    response = httpx.post(f"{server.url}/complete", json={"prompt": "a", "stream": False, **body}, timeout=60)
    return response.status_code, time.monotonic() - start, response


def test_who_leaves_while_waiting_is_never_computed(narrow: Server, promise: Promise) -> None:
    n, before = promise.size(40, 400), _started(narrow)
    with _send(narrow, **_HOLDER) as holder:
        assert holder.recv(100)
        waiting = [_send(narrow, **_HOLDER | {"prompt": f"word {i}", "stream": i % 3 > 0}) for i in range(n)]
        assert narrow.wait_for(lambda: narrow.metric("requests_waiting") == n)
        for i, connection in enumerate(waiting):
            reset(connection) if i % 2 == 0 else connection.close()
        assert narrow.wait_for(lambda: narrow.metric("requests_waiting") == 0)  # the holder's text takes 40 s
    assert is_clean(narrow, 30)
    computed = int(_started(narrow) - before) - 1  # without the holder's
    promise.all_of("requests whose client left the queue are never computed", n - computed, n)


def test_who_waits_too_long_is_told_so_on_time_and_leaves_the_engine_alone(serve: Services, promise: Promise) -> None:
    server = serve(*_ONE_SLOT, str(_QUEUE_SECONDS), fake_ms=5)
    n = promise.size(8, 32)

    def measure() -> float:
        with ThreadPoolExecutor(n) as threads:
            answers = list(threads.map(lambda i: _post(server, prompt=f"word {i}"), range(n)))
        assert [status for status, _, _ in answers] == [503] * n
        assert all(int(response.headers["retry-after"]) >= 1 for *_, response in answers)
        return max(seconds for _, seconds, _ in answers)

    with _send(server, **_HOLDER) as holder:
        assert holder.recv(100)
        latest = promise.measured(measure, lambda latest: latest - _QUEUE_SECONDS <= 1)
        assert server.wait_for(lambda: server.metric("requests_waiting") == 0)
    assert latest >= _QUEUE_SECONDS
    promise.at_most("delay of a queue timeout", latest - _QUEUE_SECONDS, target=0.2, floor=1, unit="s", n=n)
    assert is_clean(server, 30)
    assert server.wait_for(lambda: _started(server) == 1)


def test_a_deadline_holds_in_the_queue_while_a_text_is_written_and_while_one_is_read(
    narrow: Server, promise: Promise
) -> None:
    def is_on_time(found: tuple[int, float, httpx.Response]) -> bool:
        return found[1] < 1

    with _send(narrow, **_HOLDER) as holder:
        assert holder.recv(100)
        status, seconds, _ = promise.measured(lambda: _post(narrow, deadline_ms=300), is_on_time)
        assert status == 504 and 0.25 <= seconds < 1
    assert is_clean(narrow, 30)
    long = {"max_tokens": 8000, "ignore_eos": True, "deadline_ms": 300}
    # Without a token in its 300 ms it gets 504, as in the queue.
    status, seconds, response = promise.measured(
        lambda: _post(narrow, **long), lambda found: is_on_time(found) and found[0] == 200
    )
    assert (status, response.json()["choices"][0]["finish_reason"]) == (200, "timeout") and seconds < 1
    # A thread reads long texts one after the other: the deadline of those that wait for it runs already.
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: _post(narrow, prompt="fox" * 30_000, deadline_ms=5), range(8)))
    assert {status for status, _, _ in answers} <= {400, 503, 504}
    assert any(status == 504 for status, _, _ in answers)
    assert is_clean(narrow, 30)
