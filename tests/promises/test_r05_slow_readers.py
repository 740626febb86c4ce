"""R5: Readers that stop reading hurt only themselves: other streams keep their speed, and a stalled reader holds little
memory.

A stalled reader holds no cache block: the engine writes to the request's buffer until more than 4,096 tokens and
log-probabilities wait there, then suspends the request. A buffered token takes 300 bytes, so completions of up to
about 800 tokens stay within 256 KiB; the maximum for any request is 3 MiB.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.support.armed_faults import Faults
from tests.support.http.raw_client import connect, post_request
from tests.support.load.concurrent_clients import seeded, send_all
from tests.support.processes import memory
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

WRITE_TIMEOUT = 2.0
STALLED: dict[str, Any] = {"prompt": "a", "max_tokens": 700, "ignore_eos": True}
NORMAL: dict[str, Any] = {"prompt": "b", "max_tokens": 300, "ignore_eos": True}
N_NORMAL = 20
MAX_SLOWDOWN = 1.3
"""Highest accepted ratio of the gaps between other streams' tokens."""
HOSTILE: dict[str, Any] = {"prompt": "a", "n": 16, "max_tokens": 500, "logprobs": 20, "ignore_eos": True}
LONG: dict[str, Any] = {"prompt": "a", "n": 4, "max_tokens": 8000, "ignore_eos": True}
MAX_MEMORY_KIB = 3072.0
"""KiB for the largest possible request: the full buffer twice (waiting, and being written), and its journal."""


@contextmanager
def _stalled(server: Server, n: int, body: dict[str, Any] = STALLED) -> Iterator[list[socket.socket]]:
    """`n` streams whose readers never read; yields when the engine has finished with all of them."""
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server, receive_buffer=4096)) for _ in range(n)]
        for i, connection in enumerate(connections):
            connection.sendall(post_request({**body, "seed": i}))
        # A request may run only briefly, so wait for its first event; MSG_PEEK consumes nothing.
        assert server.wait_for(lambda: all(map(_has_started, connections)), 60)
        assert server.wait_for(lambda: server.metric("requests_running") + server.metric("requests_waiting") == 0, 300)
        yield connections


def _has_started(connection: socket.socket) -> bool:
    try:
        return b"event: token" in connection.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _p99_gap(server: Server) -> float:
    streams = send_all(server, seeded(NORMAL, N_NORMAL))
    assert all(stream.is_complete for stream in streams)
    gaps = sorted(gap for stream in streams for gap in stream.gaps)
    return gaps[int(len(gaps) * 0.99)]


def _measure_while_stalled(server: Server, n: int) -> tuple[float, float, float]:
    """p99 token gap of other streams, relative to alone; bytes and blocks that stalled readers hold."""
    before, alone = memory(server.process.pid), min(_p99_gap(server) for _ in range(2))
    with _stalled(server, n):
        assert server.metric("connections") >= n, "the stalled readers must be connected during the measurement"
        held, blocks = (memory(server.process.pid) - before) / n, server.metric("kv_cache_usage_ratio")
        loaded = min(_p99_gap(server) for _ in range(2))
        assert server.metric("connections") > n, "the stalled readers were disconnected during the measurement"
    assert server.wait_for(lambda: server.metric("connections") <= 1, 60)
    return loaded / alone, held, blocks


@pytest.mark.timed
def test_stalled_readers_do_not_slow_others_and_hold_little_memory(serve: Services, promise: Promise) -> None:
    n = promise.size(60, 200)
    flags = ("--max-running", str(n + N_NORMAL), "--write-timeout", "600", "--kv-blocks", "40000")
    server = serve(*flags, fake_ms=5)
    samples: list[tuple[float, float, float]] = []

    def measure() -> float:
        samples.append(_measure_while_stalled(server, n))
        return samples[-1][0]

    send_all(server, seeded({**STALLED, "max_tokens": 300}, n))  # warm-up: memory that the service itself needs
    send_all(server, seeded(NORMAL, N_NORMAL))
    slowdown = promise.measured(measure, lambda slowdown: slowdown <= MAX_SLOWDOWN)
    _, held, blocks = map(max, zip(*samples, strict=True))
    what = "p99 between tokens beside stalled readers, relative to alone"
    promise.at_most(what, slowdown, target=1.1, floor=MAX_SLOWDOWN, unit="x", n=n)
    promise.at_most("memory of a stalled reader", held / 1024, target=256, unit="KiB", n=n)
    promise.at_most("cache blocks held by stalled readers", blocks, target=0, unit="", n=n)


def _seconds_until_disconnected(server: Server, n: int) -> float:
    """Seconds until the service disconnects the readers, counted from when all of them have stalled."""
    cut = 'connections_cut_total{reason="write_stalled"}'
    before = server.metric(cut)
    with _stalled(server, n):
        began = time.monotonic()
        assert server.wait_for(lambda: server.metric(cut) == before + n, 60)
        assert server.wait_for(lambda: server.metric("connections") <= 1)
        return time.monotonic() - began


def test_stalled_readers_are_disconnected(serve: Services, promise: Promise) -> None:
    n = promise.size(60, 200)
    flags = ("--max-running", str(n), "--write-timeout", str(WRITE_TIMEOUT))
    server = serve(*flags, fake_ms=1)
    limit = WRITE_TIMEOUT + 2
    seconds = promise.measured(lambda: _seconds_until_disconnected(server, n), lambda seconds: seconds < limit)
    assert seconds < limit
    promise.all_of("stalled readers closed on time", n, n)


def _memory_of(server: Server, n: int, body: dict[str, Any]) -> float:
    """KiB of memory per reader, with `n` stalled readers."""
    send_all(server, seeded({**body, "max_tokens": 20}, n))  # warm-up: memory that the service itself needs
    before = memory(server.process.pid)
    with _stalled(server, n, body):
        return (memory(server.process.pid) - before) / n / 1024


@pytest.mark.parametrize(("kind", "body"), [("log-probabilities", HOSTILE), ("a long text", LONG)])
def test_stalled_readers_of_large_responses_hold_little_memory(
    serve: Services, promise: Promise, kind: str, body: dict[str, Any]
) -> None:
    n = promise.size(6, 40)
    flags = ("--max-running", str(n * 16), "--write-timeout", "600", "--kv-blocks", "40000")
    server = serve(*flags, fake_ms=1)
    held = _memory_of(server, n, body)
    promise.at_most(f"memory of a stalled reader of {kind}", held, target=2048, floor=MAX_MEMORY_KIB, unit="KiB", n=n)


def test_missing_buffer_bound_and_missing_write_timeout_are_detected(serve: Services, faults: Faults) -> None:
    """Positive controls."""
    faults.arm("stream.unbounded", "keep")
    flags = ("--write-timeout", "600", "--kv-blocks", "40000")
    server = serve(*flags, fake_ms=1, environment=faults.removing("stream.unbounded"))
    assert _memory_of(server, 2, HOSTILE) > MAX_MEMORY_KIB
    faults.disarm()
    assert server.wait_for(lambda: server.metric("connections") <= 1)
    with _stalled(server, 3):
        cut = 'connections_cut_total{reason="write_stalled"}'
        assert not server.wait_for(lambda: server.metric(cut) == 3, 3)
        assert server.metric("connections") >= 3
