"""S28: A connection without an API key, whatever it sends and however fast, costs the stream of a key at most 1.2 times
its time alone; sixteen of them at most twice.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.keyed_server import Keyring
from tests.support.load.keyless_flood import FLOODS, keyless_flood
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_FLOORS = {1: (1.2, 2.0), 16: (2.0, 4.0)}
"""Target and floor by the number of connections."""


@pytest.fixture(scope="module")
def server(serve_module: Services, ring: Keyring, faults: Faults) -> Server:
    """The fake engine, whose steps take 5 ms whatever else the machine does."""
    return serve_module(ring=ring, fake_ms=5, environment=faults.removing("best_effort.unlimited"), is_killed=True)


@pytest.fixture
def stream_seconds(server: Server, ring: Keyring) -> Callable[[], float]:
    """Seconds of one stream of 40 tokens, on a connection of its own."""
    body = {"prompt": "a", "max_tokens": 40, "ignore_eos": True}

    def measure() -> float:
        started = time.perf_counter()
        response = httpx.post(f"{server.url}/complete", json=body, headers=ring.headers("victim"), timeout=120)
        assert response.status_code == 200 and "event: done" in response.text
        return time.perf_counter() - started

    return measure


def _ratio(server: Server, seconds: Callable[[], float], kind: str, connections: int, n: int) -> float:
    alone = statistics.median(seconds() for _ in range(n))
    with keyless_flood(urlsplit(server.url).port or 0, kind, connections):
        return statistics.median(seconds() for _ in range(n)) / alone


@pytest.mark.timed
@pytest.mark.parametrize("connections", _FLOORS)
@pytest.mark.parametrize("kind", FLOODS)
def test_streams_of_a_key_beside_connections_without_one(
    server: Server, stream_seconds: Callable[[], float], promise: Promise, kind: str, connections: int
) -> None:
    target, floor = _FLOORS[connections]
    n = promise.size(3, 9)
    found = promise.measured(
        lambda: _ratio(server, stream_seconds, kind, connections, n), lambda ratio: ratio <= target
    )
    print(kind, connections, found)
    what = f"stream beside {connections} keyless connection{'s' * (connections > 1)}: {kind}, against alone"
    promise.at_most(what, found, target=target, floor=floor, n=n)


def test_floods_without_a_limited_share_are_detected(
    server: Server, stream_seconds: Callable[[], float], faults: Faults
) -> None:
    """Positive control. Tries again, because a flood before it may still slow down the stream alone."""
    found: list[float] = []
    with faults.armed("best_effort.unlimited", "remove"):
        while len(found) < 3 and (not found or found[-1] <= _FLOORS[16][1]):
            found.append(_ratio(server, stream_seconds, "tiny chunks after a response", 16, 1))
    assert found[-1] > _FLOORS[16][1], found
