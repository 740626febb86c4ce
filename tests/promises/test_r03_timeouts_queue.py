"""A request that waits longer than --queue-timeout gets an error; one that leaves the queue is never computed."""

from __future__ import annotations

import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.http.raw_client import connect, post
from tests.support.promise_figures import Promise
from tests.support.servers import Server, is_clean
from tests.support.services import Services

_QUEUE_SECONDS = 1.0
_HOLDER: dict[str, Any] = {"prompt": "hold", "max_tokens": 8000, "ignore_eos": True}


_FLAGS = ("--max-running", "1", "--resume-seconds", "0", "--queue-timeout")
"""One slot."""


@pytest.fixture
def patient(serve: Services) -> Server:
    """A service with a queue timeout that no test reaches."""
    return serve(*_FLAGS, "600", fake_ms=5)


@pytest.fixture
def hasty(serve: Services) -> Server:
    """A second in the queue is enough."""
    return serve(*_FLAGS, str(_QUEUE_SECONDS), fake_ms=5)


def _send(server: Server, **body: Any) -> socket.socket:
    connection = connect(server)
    connection.sendall(post(body))
    return connection


def _disconnect(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _post(server: Server, **body: Any) -> tuple[int, float, httpx.Response]:
    start = time.monotonic()
    response = httpx.post(f"{server.url}/complete", json={"prompt": "a", "stream": False, **body}, timeout=60)
    return response.status_code, time.monotonic() - start, response


def test_who_leaves_while_waiting_is_never_computed(patient: Server, promise: Promise) -> None:
    server = patient
    n = promise.size(40, 400)
    with _send(server, **_HOLDER) as holder:
        assert holder.recv(100)
        waiting = [_send(server, **_HOLDER | {"prompt": f"word {i}", "stream": i % 3 > 0}) for i in range(n)]
        assert server.wait_for(lambda: server.metric("requests_waiting") == n)
        for i, connection in enumerate(waiting):
            _disconnect(connection, reset=i % 2 == 0)
        assert server.wait_for(lambda: server.metric("requests_waiting") == 0)  # the holder's text takes 40 s
    assert is_clean(server, 30)
    # The holder's is the only request that began: only what began has its time in the queue counted.
    started = server.metric("queue_duration_seconds_count")
    promise.all_of("requests whose client left the queue are never computed", n - (int(started) - 1), n)


def test_who_waits_too_long_is_told_so_on_time_and_leaves_the_engine_alone(hasty: Server, promise: Promise) -> None:
    server = hasty
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
    promise.at_most("a queue time-out comes late by", latest - _QUEUE_SECONDS, target=0.2, floor=1, unit="s", n=n)
    assert is_clean(server, 30)
    assert server.wait_for(lambda: server.metric("queue_duration_seconds_count") == 1)


def test_a_deadline_holds_in_the_queue_while_a_text_is_written_and_while_one_is_read(
    patient: Server, promise: Promise
) -> None:
    server = patient

    def is_on_time(found: tuple[int, float, httpx.Response]) -> bool:
        return found[1] < 1

    with _send(server, **_HOLDER) as holder:
        assert holder.recv(100)
        status, seconds, _ = promise.measured(lambda: _post(server, deadline_ms=300), is_on_time)
        assert status == 504 and 0.25 <= seconds < 1
    assert is_clean(server, 30)
    long = {"max_tokens": 8000, "ignore_eos": True, "deadline_ms": 300}
    # Without a token in its 300 ms it gets 504, as in the queue.
    status, seconds, response = promise.measured(
        lambda: _post(server, **long), lambda found: is_on_time(found) and found[0] == 200
    )
    assert (status, response.json()["choices"][0]["finish_reason"]) == (200, "timeout") and seconds < 1
    # A thread reads long texts one after the other: the deadline of those that wait for it runs already.
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: _post(server, prompt="fox" * 30_000, deadline_ms=5), range(8)))
    assert {status for status, _, _ in answers} <= {400, 503, 504}
    assert any(status == 504 for status, _, _ in answers)
    assert is_clean(server, 30)
