"""R3: Clients that are slow to send headers, a body or the next request, or to read an answer, lose their connection.

The timeouts of the queue are in test_r03_timeouts_queue.py.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest

from tests.support.http.raw_client import (
    STREAM,
    connect,
    dribble,
    error_of,
    get,
    post,
    read_all,
    read_answer,
    status_of,
)
from tests.support.promise_figures import Promise
from tests.support.servers import Server
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


def _after(deed: Callable[[], object], wait: Callable[[], bytes]) -> _Cut:
    before = time.monotonic()
    deed()
    after = time.monotonic()
    said = wait()
    now = time.monotonic()
    return _Cut(now - before, now - after, said)


def _fresh(server: Server) -> _Cut:
    with ExitStack() as stack:
        connections: list[socket.socket] = []
        return _after(
            lambda: connections.append(stack.enter_context(connect(server))), lambda: read_all(connections[0])
        )


def _after_sending(first: bytes, wait: Callable[[socket.socket], bytes] = read_all) -> Callable[[Server], _Cut]:
    def case(server: Server) -> _Cut:
        with connect(server) as connection:
            return _after(lambda: connection.sendall(first), lambda: wait(connection))

    return case


def _slowly(data: bytes) -> Callable[[socket.socket], bytes]:
    return lambda connection: dribble(connection, data, 0.03)


def _idle(server: Server) -> _Cut:
    def be_answered() -> None:
        connection.sendall(get())
        assert status_of(read_answer(connection)) == 200

    with connect(server) as connection:
        return _after(be_answered, lambda: read_all(connection))


def _slow_second_head(server: Server) -> _Cut:
    with connect(server) as connection:
        connection.sendall(get())
        read_answer(connection)
        time.sleep(IDLE / 2)
        return _after(lambda: connection.sendall(get()[:20]), lambda: read_all(connection))


_BODY = post({"prompt": "x" * 1000})
CASES: dict[str, tuple[Callable[[Server], _Cut], float, str | None]] = {
    "nothing": (_fresh, HEAD, None),
    "half a head": (_after_sending(get()[:20]), HEAD, "head_timeout"),
    "a slow head": (_after_sending(b"G", _slowly((get() * 10)[1:])), HEAD, "head_timeout"),
    "half a body": (_after_sending(post(STREAM)[:-5]), BODY, "body_timeout"),
    "a slow body": (_after_sending(_BODY[:200], _slowly(_BODY[200:])), BODY, "body_timeout"),
    "no second request": (_idle, IDLE, None),
    "a slow second head": (_slow_second_head, HEAD, "head_timeout"),
}


def _measured(server: Server, promise: Promise, case: Callable[[Server], _Cut], due: float, status: int) -> _Cut:
    """A client that sends too late, because it got no core, was disconnected before that: such a run does not count."""
    return promise.measured(
        lambda: case(server), lambda cut: cut.at_least <= due + LATE and status_of(cut.said) == status
    )


def test_each_deadline_for_the_sender_is_kept_and_told(impatient: Server, promise: Promise) -> None:
    late = []
    for name, (case, due, code) in CASES.items():
        cut = _measured(impatient, promise, case, due, 408 if code else 0)
        assert cut.at_most > due - 0.1, (name, "too early")
        late.append(cut.at_least - due)
        if code:
            assert status_of(cut.said) == 408, (name, cut.said)
            assert error_of(cut.said)["code"] == code
        else:
            assert cut.said == b"", name
    promise.at_most("slow sender cut after its deadline", max(late), target=0.1, floor=LATE, unit="s", n=len(late))


def test_a_reader_that_stops_is_cut_and_may_come_back(impatient: Server, promise: Promise) -> None:
    before = _cut(impatient, "write_stalled")
    with connect(impatient, receive_buffer=4096) as connection:
        began = time.monotonic()
        connection.sendall(post(STREAM))
        assert impatient.wait_for(lambda: _cut(impatient, "write_stalled") > before, 60)
        seconds = time.monotonic() - began
        assert seconds > WRITE
        said = read_all(connection)
    name = said.partition(b"x-request-id: ")[2].partition(b"\r\n")[0].decode()
    assert impatient.wait_for(lambda: impatient.metric("requests_running") == 0)
    with connect(impatient) as connection:
        connection.sendall(get(f"/complete/{name}/events", "Connection: close"))
        again = read_all(connection)
    assert again.count(b"event: token") > 1000 and again.count(b"event: done") == 1
    promise.all_of("a stalled reader is cut and can resume", 1, 1)


def _cut(server: Server, reason: str) -> float:
    return server.metric(f'connections_cut_total{{reason="{reason}"}}')


def _read_slowly(server: Server) -> bytes:
    got = b""
    with connect(server, receive_buffer=4096) as connection, suppress(ConnectionError):
        connection.sendall(post({**STREAM, "max_tokens": 600}, "/complete", "Connection: close"))
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


def test_pipelined_requests_do_not_pile_up(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(post({**STREAM, "max_tokens": 100}) + get() * 5000)
        said = read_all(connection)
    assert said.count(b"HTTP/1.1 200 OK") == 1 and b"event: done" in said
    with connect(server) as connection:  # one after the other is no pile
        for _ in range(50):
            connection.sendall(get())
            assert status_of(read_answer(connection)) == 200


def test_a_post_of_a_client_that_has_finished_sending_is_that_of_one_that_has_left(impatient: Server) -> None:
    with connect(impatient) as connection:
        connection.sendall(post({**STREAM, "max_tokens": 8000, "stream": False}))  # 16 s
        assert impatient.wait_for(lambda: impatient.metric("requests_running") == 1)
        connection.shutdown(1)
        assert impatient.wait_for(lambda: impatient.metric("requests_running") == 0, 10)
