"""R6: Clients that send or read very slowly are disconnected at their deadline, connections that send nothing, or half
a request head, are closed to make room, and other clients are not delayed.

The service never closes a connection with an active request, or one whose body is arriving, to make room.

nginx, which has one address for the service, also closes silent and idle connections, but not those with incomplete
headers: at worker_connections they block other clients until client_header_timeout. limit_conn bounds the requests of
one client.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support import ROOT
from tests.support.http.nginx import needs_nginx, running_nginx
from tests.support.http.raw_client import STREAM, get_request, post_request, read_all, status_of
from tests.support.http.socket_queues import has_read_all
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

DEADLINE, LATE = 1.5, 1.0
FLAGS = [f"--{name}-timeout={DEADLINE}" for name in ("head", "body", "write")]
KINDS = {
    # slowhttptest -H, -B and -X: one header, one piece of the body, or a few bytes read at a time.
    "headers": get_request()[:-2],
    "body": post_request({"prompt": "x" * 500})[:-400],
    "read": post_request({"prompt": "a", "max_tokens": 600, "ignore_eos": True}),
}


async def _attack(server: Server, kind: str, rng: random.Random) -> float:
    """Seconds that one slow client keeps its connection."""
    parts = urlsplit(server.url)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, (parts.hostname, parts.port))
    began = time.monotonic()
    with raw, contextlib.suppress(ConnectionError):
        await loop.sock_sendall(raw, KINDS[kind])
        while time.monotonic() - began < 6:
            if kind == "read":
                await asyncio.sleep(0.2)
                if not await loop.sock_recv(raw, 5):
                    break
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2 * rng.random()):
                    await loop.sock_recv(raw, 1)
                    break
            await loop.sock_sendall(raw, b"X-a: b\r\n" if kind == "headers" else b"x")
    return time.monotonic() - began


async def _attack_all(server: Server, n: int) -> dict[str, list[float]]:
    rng = random.Random(6)
    kinds = list(KINDS)
    kept = await asyncio.gather(*(_attack(server, kinds[i % 3], rng) for i in range(n)))
    return {kind: kept[i::3] for i, kind in enumerate(kinds)}


def _completes(server: Server) -> bool:
    answer = httpx.post(f"{server.url}/complete", json={"prompt": "a", "max_tokens": 5, "stream": False}, timeout=60)
    return answer.status_code == 200


@dataclass(frozen=True, slots=True)
class _Measurement:
    """Measurements of slow clients, and of concurrent normal ones."""

    late: dict[str, float]
    """Seconds after the deadline until the service disconnected the last client of each kind."""
    answered: list[bool]

    @property
    def worst(self) -> float:
        return max(self.late["headers"], self.late["body"], self.late["read"] - LATE)


def _measure_under_attack(server: Server, n: int) -> _Measurement:
    cut = 'connections_cut_total{reason="write_stalled"}'
    began, before, answered = time.monotonic(), server.metric(cut), []
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(asyncio.run, _attack_all(server, n))
        while time.monotonic() - began < 15:
            answered.append(_completes(server))
            time.sleep(0.02)
            # A slow reader can still read from its own kernel buffer, so only the metric shows the disconnect.
            if server.metric(cut) == before + n // 3:
                break
        slow_read = time.monotonic() - began
    late = {kind: max(attack.result()[kind]) - DEADLINE for kind in ("headers", "body")}
    return _Measurement({**late, "read": slow_read - 2 * DEADLINE}, answered)


def test_slow_clients_are_disconnected_at_the_deadline_and_others_served(serve: Services, promise: Promise) -> None:
    n = promise.size(90, 501)
    server = serve(*FLAGS, "--max-running", "200", fake_ms=1)
    measurements: list[_Measurement] = []

    def measure() -> _Measurement:
        measurements.append(_measure_under_attack(server, n))
        return measurements[-1]

    found = promise.measured(measure, lambda found: found.worst <= LATE)
    for kind in ("headers", "body"):
        what = f"slow {kind}: disconnected after the deadline"
        promise.at_most(what, found.late[kind], target=0.3, floor=LATE, unit="s", n=n // 3)
    # The deadline starts when the kernels' buffers are full, and each KiB read restarts it.
    what = "slow read: disconnected after the deadline"
    promise.at_most(what, found.late["read"], target=0.3, floor=2 * LATE, unit="s", n=n // 3)
    answered = [answer for each in measurements for answer in each.answered]
    promise.all_of("normal requests served beside slow clients", sum(answered), len(answered))
    assert server.wait_for(lambda: server.metric("connections") <= 1)


MAX_CONNECTIONS, MAX_PER_ADDRESS = 40, 20
INCOMPLETE_HEADERS, INCOMPLETE_BODY = get_request()[:-2], post_request({"prompt": "a" * 100})[:-50]
INACTIVE = {"silent": b"", "incomplete headers": INCOMPLETE_HEADERS, "idle": get_request()}


@pytest.fixture(scope="module")
def low_limits(serve_module: Services) -> Server:
    """A service with low connection limits and a long header timeout."""
    flags = (
        f"--max-connections={MAX_CONNECTIONS}",
        f"--max-connections-per-address={MAX_PER_ADDRESS}",
        "--head-timeout=60",
    )
    return serve_module(*flags, fake_ms=1)


def test_slow_clients_stay_connected_without_a_deadline(low_limits: Server) -> None:
    """Control."""

    async def attack() -> None:
        slow = [asyncio.ensure_future(_attack(low_limits, kind, random.Random(1))) for kind in ("headers", "body")]
        done, _ = await asyncio.wait(slow, timeout=DEADLINE + LATE + 0.5)
        assert not done

    asyncio.run(attack())


@pytest.fixture
def connections(low_limits: Server) -> Iterator[list[socket.socket]]:
    """Connections; the fixture closes them and waits until the service has dropped them."""
    connections: list[socket.socket] = []
    yield connections
    for connection in connections:
        connection.close()
    assert low_limits.wait_for(lambda: low_limits.metric("connections") <= 1)


def _dial(url: str, address: str, data: bytes = b"") -> socket.socket:
    port = int(url.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), 60, source_address=(address, 0))
    connection.sendall(data)
    return connection


def _status(url: str, address: str) -> int:
    body = {"prompt": "a", "max_tokens": 2, "stream": False}
    with _dial(url, address, post_request(body, "/complete", "Connection: close")) as connection:
        return status_of(read_all(connection))


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(65536))
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


@pytest.mark.parametrize("kind", INACTIVE)
@pytest.mark.parametrize("times", [1, 5])
def test_connections_at_the_limit_do_not_block_other_clients(
    low_limits: Server, connections: list[socket.socket], promise: Promise, kind: str, times: int
) -> None:
    for _ in range(MAX_PER_ADDRESS * times):
        connections += [_dial(low_limits.url, address, INACTIVE[kind]) for address in ("127.0.0.2", "127.0.0.3")]
    assert low_limits.wait_for(lambda: has_read_all(low_limits))
    answers = [
        _status(low_limits.url, address) for address in ("127.0.0.9", "127.0.0.2", "127.0.0.3") for _ in range(5)
    ]
    promise.all_of(f"requests served beside connections at the limit: {kind}", answers.count(200), len(answers))


@pytest.mark.parametrize(
    "data", [INCOMPLETE_BODY, post_request({**STREAM, "max_tokens": 8000})], ids=["body", "response"]
)
def test_connections_with_an_active_request_are_not_evicted(
    low_limits: Server, connections: list[socket.socket], data: bytes
) -> None:
    """If no connection is idle, the service refuses new connections and evicts none."""
    connections += [
        _dial(low_limits.url, address, data) for _ in range(MAX_PER_ADDRESS) for address in ("127.0.0.2", "127.0.0.3")
    ]
    assert low_limits.wait_for(lambda: has_read_all(low_limits))  # until then these connections count as silent
    assert [_status(low_limits.url, address) for address in ("127.0.0.9", "127.0.0.2")] == [503, 503]
    assert all(_is_open(connection) for connection in connections)


@needs_nginx
def test_behind_nginx_one_client_cannot_take_all_connections(
    low_limits: Server, connections: list[socket.socket], tmp_path: Path
) -> None:
    """deploy/nginx/inkstream.conf, with lower limits."""
    text = (ROOT / "deploy/nginx/inkstream.conf").read_text()
    for old, new in {
        "inkstream:8000": low_limits.url.removeprefix("http://"),
        "listen 8080": "listen 127.0.0.1:PORT",
        "inkstream_clients 1024": "inkstream_clients 5",
    }.items():
        assert old in text
        text = text.replace(old, new)
    with running_nginx(tmp_path, text, f"worker_connections {MAX_CONNECTIONS};") as url:
        connections += [_dial(url, "127.0.0.2", INCOMPLETE_BODY) for _ in range(5)]
        assert low_limits.wait_for(lambda: _status(url, "127.0.0.2") == 503)
        assert _status(url, "127.0.0.9") == 200
        for data in (b"", get_request("/health/live")):
            connections += [_dial(url, "127.0.0.3", data) for _ in range(2 * MAX_CONNECTIONS)]
            assert _status(url, "127.0.0.9") == 200
