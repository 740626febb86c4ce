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
def short_timeouts(serve_module: Services) -> Server:
    """A service with short timeouts."""
    return serve_module(*map(str, FLAGS), fake_ms=2)


@dataclass(frozen=True, slots=True)
class _Disconnect:
    """How long the service kept a connection, and the bytes received on it.

    The deadline starts while the client sends. The test may get no CPU for a moment, so the true duration is between
    `at_least` and `at_most`.
    """

    at_most: float
    """Seconds from before the client sent."""
    at_least: float
    """Seconds from after the client sent."""
    response: bytes


def _disconnect_time(
    server: Server, *, rest: float | None = None, first: bytes = b"", slowly: bytes = b""
) -> _Disconnect:
    """Connect (and stay idle for `rest` seconds); send `first`, then `slowly` byte by byte, until disconnected."""
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
        response = send_slowly(connection, slowly, 0.03) if slowly else read_all(connection)
        now = time.monotonic()
    return _Disconnect(now - before, now - after, response)


_BODY = post_request({"prompt": "x" * 1000})
CASES: dict[str, tuple[dict[str, Any], float, str | None]] = {
    "nothing": ({}, HEAD, None),
    "incomplete headers": ({"first": get_request()[:20]}, HEAD, "head_timeout"),
    "slow headers": ({"first": b"G", "slowly": (get_request() * 10)[1:]}, HEAD, "head_timeout"),
    "incomplete body": ({"first": post_request(STREAM)[:-5]}, BODY, "body_timeout"),
    "slow body": ({"first": _BODY[:200], "slowly": _BODY[200:]}, BODY, "body_timeout"),
    "no second request": ({"rest": 0.0}, IDLE, None),
    "slow headers of a second request": ({"rest": IDLE / 2, "first": get_request()[:20]}, HEAD, "head_timeout"),
}


def test_slow_senders_are_disconnected_on_time_with_the_right_error(short_timeouts: Server, promise: Promise) -> None:
    late = []
    for name, (case, due, code) in CASES.items():
        # If the client got no CPU and sent too late, it was disconnected before: such a run does not count.
        cut = promise.measured(
            lambda case=case: _disconnect_time(short_timeouts, **case),  # type: ignore[misc]
            lambda cut, due=due, code=code: (
                cut.at_least <= due + LATE and status_of(cut.response) == (408 if code else 0)
            ),
        )
        assert cut.at_most > due - 0.1, (name, "too early")
        late.append(cut.at_least - due)
        if code:
            assert status_of(cut.response) == 408, (name, cut.response)
            assert error_of(cut.response)["code"] == code
        else:
            assert cut.response == b"", name
    promise.at_most(
        "slow sender disconnected after its deadline", max(late), target=0.1, floor=LATE, unit="s", n=len(late)
    )


def test_stalled_reader_is_disconnected_and_can_resume(short_timeouts: Server, promise: Promise) -> None:
    before = _n_disconnected(short_timeouts, "write_stalled")
    with connect(short_timeouts, receive_buffer=4096) as connection:
        began = time.monotonic()
        connection.sendall(post_request(STREAM))
        assert short_timeouts.wait_for(lambda: _n_disconnected(short_timeouts, "write_stalled") > before, 60)
        seconds = time.monotonic() - began
        assert seconds > WRITE
        response = read_all(connection)
    name = response.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
    assert short_timeouts.wait_for(lambda: short_timeouts.metric("requests_running") == 0)
    with connect(short_timeouts) as connection:
        connection.sendall(get_request(f"/complete/{name}/events", "Connection: close"))
        again = read_all(connection)
    assert again.count(b"event: token") > 1000 and again.count(b"event: done") == 1
    promise.all_of("stalled readers that are disconnected and can resume", 1, 1)


def _n_disconnected(server: Server, reason: str) -> float:
    return server.metric(f'connections_cut_total{{reason="{reason}"}}')


def _read_slowly(server: Server) -> bytes:
    got = b""
    with connect(server, receive_buffer=4096) as connection, suppress(ConnectionError):
        connection.sendall(post_request({**STREAM, "max_tokens": 600}, "/complete", "Connection: close"))
        while part := connection.recv(2048):
            got += part
            time.sleep(0.05)  # 40 KB/s at most, the rate of the stream
    return got


def test_slow_but_steady_reader_stays_connected(short_timeouts: Server, promise: Promise) -> None:
    # A reader that gets no CPU for 0.6 s counts as stalled and is correctly disconnected.
    def measure() -> tuple[bytes, float]:
        before = _n_disconnected(short_timeouts, "write_stalled")
        return _read_slowly(short_timeouts), _n_disconnected(short_timeouts, "write_stalled") - before

    got, n_disconnected = promise.measured(measure, lambda found: not found[1])
    assert b"event: done" in got
    assert n_disconnected == 0


def test_pipelined_requests_do_not_accumulate(short_timeouts: Server) -> None:
    with connect(short_timeouts) as connection:
        connection.sendall(post_request({**STREAM, "max_tokens": 100}) + get_request() * 5000)
        response = read_all(connection)
    assert response.count(b"HTTP/1.1 200 OK") == 1 and b"event: done" in response
    with connect(short_timeouts) as connection:  # sequential requests are all served
        for _ in range(50):
            connection.sendall(get_request())
            assert status_of(read_response(connection)) == 200


def test_half_closed_connection_cancels_its_request(short_timeouts: Server) -> None:
    with connect(short_timeouts) as connection:
        connection.sendall(post_request({**STREAM, "max_tokens": 8000, "stream": False}))  # 16 s
        assert short_timeouts.wait_for(lambda: short_timeouts.metric("requests_running") == 1)
        connection.shutdown(1)
        assert short_timeouts.wait_for(lambda: short_timeouts.metric("requests_running") == 0, 10)


_QUEUE_SECONDS = 1.0
_HOLDER: dict[str, Any] = {"prompt": "hold", "max_tokens": 8000, "ignore_eos": True}
_ONE_SLOT = ("--max-running", "1", "--resume-seconds", "0", "--queue-timeout")


@pytest.fixture(scope="module")
def one_slot(serve_module: Services) -> Server:
    """One slot, with a long queue timeout."""
    return serve_module(*_ONE_SLOT, "600", fake_ms=5)


def _n_started(server: Server) -> float:
    """Number of requests that started: the metric counts queue times of started requests only."""
    return server.metric("queue_duration_seconds_count")


def _send(server: Server, **body: Any) -> socket.socket:
    connection = connect(server)
    connection.sendall(post_request(body))
    return connection


def _post(server: Server, **body: Any) -> tuple[int, float, httpx.Response]:
    start = time.monotonic()
    response = httpx.post(f"{server.url}/complete", json={"prompt": "a", "stream": False, **body}, timeout=60)
    return response.status_code, time.monotonic() - start, response


def test_request_whose_client_leaves_the_queue_is_never_computed(one_slot: Server, promise: Promise) -> None:
    n, before = promise.size(40, 400), _n_started(one_slot)
    with _send(one_slot, **_HOLDER) as holder:
        assert holder.recv(100)
        waiting = [_send(one_slot, **_HOLDER | {"prompt": f"word {i}", "stream": i % 3 > 0}) for i in range(n)]
        assert one_slot.wait_for(lambda: one_slot.metric("requests_waiting") == n)
        for i, connection in enumerate(waiting):
            reset(connection) if i % 2 == 0 else connection.close()
        assert one_slot.wait_for(lambda: one_slot.metric("requests_waiting") == 0)  # the holder's completion takes 40 s
    assert is_clean(one_slot, 30)
    computed = int(_n_started(one_slot) - before) - 1  # excluding the holder
    promise.all_of("requests whose client left the queue are never computed", n - computed, n)


def test_queue_timeout_returns_503_on_time_without_computing(serve: Services, promise: Promise) -> None:
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
    assert server.wait_for(lambda: _n_started(server) == 1)


def test_deadline_applies_while_queued_decoding_and_tokenizing(one_slot: Server, promise: Promise) -> None:
    def is_on_time(found: tuple[int, float, httpx.Response]) -> bool:
        return found[1] < 1

    with _send(one_slot, **_HOLDER) as holder:
        assert holder.recv(100)
        status, seconds, _ = promise.measured(lambda: _post(one_slot, deadline_ms=300), is_on_time)
        assert status == 504 and 0.25 <= seconds < 1
    assert is_clean(one_slot, 30)
    long = {"max_tokens": 8000, "ignore_eos": True, "deadline_ms": 300}
    # A request without a token within its 300 ms gets 504, as in the queue.
    status, seconds, response = promise.measured(
        lambda: _post(one_slot, **long), lambda found: is_on_time(found) and found[0] == 200
    )
    assert (status, response.json()["choices"][0]["finish_reason"]) == (200, "timeout") and seconds < 1
    # One thread tokenizes long prompts in turn; deadlines run while prompts wait for it.
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: _post(one_slot, prompt="fox" * 30_000, deadline_ms=5), range(8)))
    assert {status for status, _, _ in answers} <= {400, 503, 504}
    assert any(status == 504 for status, _, _ in answers)
    assert is_clean(one_slot, 30)
