"""A client that disconnects, at any point and in any way, frees all its resources and changes no other output."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.http.raw_client import connect, post_request, reset
from tests.support.promise_figures import Promise
from tests.support.servers import Server, is_clean
from tests.support.services import Services
from tests.support.trials import Trials

_ENDLESS: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True}
_SHORT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 3, "ignore_eos": True}
_SECONDS = 2.0


def _half_close(connection: socket.socket) -> None:
    """Shuts down its sending side, then closes without reading."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
    time.sleep(0.05)
    connection.close()


_WAYS: tuple[Callable[[socket.socket], None], ...] = (socket.socket.close, reset, _half_close)
_STATES = ("body", "submitted", "queued", "prefilling", "decoding", "end")


def _footprint(server: Server) -> tuple[float, ...]:
    """Threads, descriptors and tasks."""
    folder = Path(f"/proc/{server.process.pid}")
    return *(len(list((folder / name).iterdir())) for name in ("task", "fd")), server.metric("event_loop_tasks")


def _connect(server: Server, body: dict[str, Any], *, part: float = 1.0) -> socket.socket:
    connection, data = connect(server), post_request(body)
    n_head = data.index(b"\r\n\r\n") + 4
    connection.sendall(data[: n_head + int((len(data) - n_head) * part)])
    return connection


def _visit(server: Server, number: int, *, stream: bool) -> str:
    """One client, which disconnects in the state and in the way that its number selects."""
    draw = random.Random(number)
    state, disconnect = _STATES[number % len(_STATES)], _WAYS[number // len(_STATES) % len(_WAYS)]
    body = {**(_SHORT if state == "end" else _ENDLESS), "stream": stream, "seed": number}
    if state == "prefilling":
        body["prompt"] = [40 + (number + i) % 100 for i in range(3000)]
    connection = _connect(server, body, part=0.5 if state == "body" else 1.0)
    with suppress(OSError):
        if state == "queued":
            time.sleep(0.05 + draw.random() / 5)
        elif state == "prefilling":
            time.sleep(draw.random() / 10)
        elif state == "decoding" and stream:
            connection.recv(2000)
            time.sleep(draw.random() / 5)
        elif state == "end":
            time.sleep(draw.random() / 2)
    disconnect(connection)
    return state


def _run_clients(server: Server, streams: int, plain: int) -> None:
    kinds = [True] * streams + [False] * plain
    random.Random(0).shuffle(kinds)
    with ThreadPoolExecutor(48) as threads:
        states = list(threads.map(lambda it: _visit(server, it[0], stream=it[1]), enumerate(kinds)))
    assert set(states) == set(_STATES)


def _completions(server: Server, n: int) -> list[str]:
    with httpx.Client(timeout=60) as client:
        bodies = [
            {"prompt": f"Tell of {i}", "max_tokens": 8, "temperature": 0, "seed": i, "stream": False} for i in range(n)
        ]
        answers = [client.post(f"{server.url}/complete", json=body).json() for body in bodies]
    return [answer["choices"][0]["text"] for answer in answers]


@pytest.fixture(scope="module")
def server(serve_module: Services, faults: Faults) -> Server:
    """A service without resumable streams: a disconnect cancels the request."""
    flags = ("--max-running", "16", "--max-waiting", "4096", "--resume-seconds", "0")
    flags += ("--max-waiting-tokens", "10000000")
    return serve_module(*flags, fake_ms=5, environment=faults.removing("allocator.release"))


def test_disconnects_in_any_state_free_all_resources(server: Server, promise: Promise) -> None:
    outputs_before = _completions(server, 100)
    _run_clients(server, 30, 10)  # warm-up: creates pools and caches that persist
    assert is_clean(server)
    before = _at_rest(server)
    streams, plain = promise.size(100, 1000), promise.size(20, 200)

    def measure() -> tuple[float, float]:
        _run_clients(server, streams, plain)
        left = time.monotonic()
        assert is_clean(server)
        blocks = time.monotonic() - left
        assert server.wait_for(lambda: not _has_grown(before, _footprint(server))), (before, _footprint(server))
        return blocks, time.monotonic() - left

    blocks, all_free = promise.measured(measure, lambda found: max(found) <= _SECONDS)
    n = streams + plain
    promise.at_most("time until all blocks and slots are free", blocks, target=1, floor=_SECONDS, unit="s", n=n)
    promise.at_most(
        "time until tasks, threads and descriptors are back to the count before",
        all_free,
        target=1,
        floor=_SECONDS,
        unit="s",
        n=n,
    )
    trials = Trials()
    for expected, got in zip(outputs_before, _completions(server, 100), strict=True):
        trials.compare(expected, got, log=server.log)
    promise.all_of("greedy outputs identical before and after", trials)


def _at_rest(server: Server) -> tuple[float, ...]:
    """The least of several samples: the cleanup of a disconnected client may still be under way."""
    samples = []
    for _ in range(6):
        samples.append(_footprint(server))
        time.sleep(0.05)
    return tuple(map(min, zip(*samples, strict=True)))


def _has_grown(before: tuple[float, ...], now: tuple[float, ...]) -> bool:
    return any(more > less for less, more in zip(before, now, strict=True))


def test_leaked_blocks_are_detected(server: Server, faults: Faults) -> None:
    """Positive control: the engine leaks the blocks of three sequences."""
    faults.arm("allocator.release", "skip", times=3)
    _run_clients(server, 20, 4)
    assert not is_clean(server, _SECONDS)
