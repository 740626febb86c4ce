"""R5: Readers that stop reading hurt only themselves: other streams keep their speed, and a stalled reader holds little
memory.

A slow reader uses no cache block: the engine writes its text into the request's own buffer until more than 4,096
tokens and log-probabilities wait there, and does nothing for it then. A token that waits takes 300 bytes, so texts of
up to some 800 tokens keep within 256 KiB; whatever is asked for, it is no more than 3 MiB.
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
SLOWER = 1.3
"""Highest accepted ratio of the gaps between other streams' tokens."""
HOSTILE: dict[str, Any] = {"prompt": "a", "n": 16, "max_tokens": 500, "logprobs": 20, "ignore_eos": True}
LONG: dict[str, Any] = {"prompt": "a", "n": 4, "max_tokens": 8000, "ignore_eos": True}
MOST_MEMORY = 3072.0
"""KiB of a reader who asks for as much as can be: what may wait twice (to be read, and being read), and its journal."""


@contextmanager
def _stalled(server: Server, n: int, body: dict[str, Any] = STALLED) -> Iterator[list[socket.socket]]:
    """`n` streams whose readers never read; the engine is done with all of them when this begins."""
    with ExitStack() as stack:
        connections = [stack.enter_context(connect(server, receive_buffer=4096)) for _ in range(n)]
        for i, connection in enumerate(connections):
            connection.sendall(post_request({**body, "seed": i}))
        # Running it may be for a moment only; that it has started can be seen, and nothing is read by it, ever after.
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
    """p99 gap of other streams' tokens, relative to that without stalled readers; bytes and blocks that these hold."""
    before, alone = memory(server.process.pid), min(_p99_gap(server) for _ in range(2))
    with _stalled(server, n):
        assert server.metric("connections") >= n, "they were meant to be there while others read"
        held, blocks = (memory(server.process.pid) - before) / n, server.metric("kv_cache_usage_ratio")
        loaded = min(_p99_gap(server) for _ in range(2))
        assert server.metric("connections") > n, "the stalled readers were disconnected while the others were read"
    assert server.wait_for(lambda: server.metric("connections") <= 1, 60)
    return loaded / alone, held, blocks


@pytest.mark.timed
def test_stalled_readers_cost_others_nothing_and_little_memory(serve: Services, promise: Promise) -> None:
    n = promise.size(60, 200)
    flags = ("--max-running", str(n + N_NORMAL), "--write-timeout", "600", "--kv-blocks", "40000")
    server = serve(*flags, fake_ms=5)
    seen: list[tuple[float, float, float]] = []

    def measure() -> float:
        seen.append(_measure_while_stalled(server, n))
        return seen[-1][0]

    send_all(server, seeded({**STALLED, "max_tokens": 300}, n))  # what a service of this size takes for itself
    send_all(server, seeded(NORMAL, N_NORMAL))
    slower = promise.measured(measure, lambda slower: slower <= SLOWER)
    _, held, blocks = map(max, zip(*seen, strict=True))
    what = "p99 between tokens beside stalled readers, relative to alone"
    promise.at_most(what, slower, target=1.1, floor=SLOWER, unit="x", n=n)
    promise.at_most("memory of a stalled reader", held / 1024, target=256, unit="KiB", n=n)
    promise.at_most("cache blocks held by stalled readers", blocks, target=0, unit="", n=n)


def _seconds_until_cut(server: Server, n: int) -> float:
    """Seconds until the service disconnects the readers, counted from when all of them have stalled."""
    cut = 'connections_cut_total{reason="write_stalled"}'
    before = server.metric(cut)
    with _stalled(server, n):
        began = time.monotonic()
        assert server.wait_for(lambda: server.metric(cut) == before + n, 60)
        assert server.wait_for(lambda: server.metric("connections") <= 1)
        return time.monotonic() - began


def test_stalled_readers_are_cut(serve: Services, promise: Promise) -> None:
    n = promise.size(60, 200)
    flags = ("--max-running", str(n), "--write-timeout", str(WRITE_TIMEOUT))
    server = serve(*flags, fake_ms=1)
    limit = WRITE_TIMEOUT + 2
    seconds = promise.measured(lambda: _seconds_until_cut(server, n), lambda seconds: seconds < limit)
    assert seconds < limit
    promise.all_of("stalled readers closed on time", n, n)


def _memory_of(server: Server, n: int, body: dict[str, Any]) -> float:
    """KiB of memory for each of `n` readers who take nothing."""
    send_all(server, seeded({**body, "max_tokens": 20}, n))  # what the service takes for itself
    before = memory(server.process.pid)
    with _stalled(server, n, body):
        return (memory(server.process.pid) - before) / n / 1024


@pytest.mark.parametrize(("kind", "body"), [("log-probabilities", HOSTILE), ("a long text", LONG)])
def test_stalled_readers_of_much_take_little_memory(
    serve: Services, promise: Promise, kind: str, body: dict[str, Any]
) -> None:
    n = promise.size(6, 40)
    flags = ("--max-running", str(n * 16), "--write-timeout", "600", "--kv-blocks", "40000")
    server = serve(*flags, fake_ms=1)
    held = _memory_of(server, n, body)
    promise.at_most(f"memory of a stalled reader of {kind}", held, target=2048, floor=MOST_MEMORY, unit="KiB", n=n)


def test_without_a_bound_they_would_take_all_and_without_a_write_time_out_they_would_stay(
    serve: Services, faults: Faults
) -> None:
    """The controls."""
    faults.arm("stream.unbounded", "keep")
    flags = ("--write-timeout", "600", "--kv-blocks", "40000")
    server = serve(*flags, fake_ms=1, environment=faults.removing("stream.unbounded"))
    assert _memory_of(server, 2, HOSTILE) > MOST_MEMORY
    faults.disarm()
    assert server.wait_for(lambda: server.metric("connections") <= 1)
    with _stalled(server, 3):
        cut = 'connections_cut_total{reason="write_stalled"}'
        assert not server.wait_for(lambda: server.metric(cut) == 3, 3)
        assert server.metric("connections") >= 3
