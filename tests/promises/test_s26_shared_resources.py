"""S26: One tenant's load on the event loop, IPC, engine steps or memory costs another at most three times of alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from tests.support.armed_faults import Faults
from tests.support.keyed_server import Keyring
from tests.support.load.noisy_neighbor import Cost, Load, cost, running
from tests.support.processes import memory
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_TARGET, _FLOOR = 3, 5
_BYTES = (1 << 20) - 200


@pytest.fixture(scope="module")
def server(serve_module: Services, ring: Keyring, faults: Faults) -> Server:
    """The fake engine."""
    environment = faults.removing("loop_share.unlimited", "tenant_queue.fifo")
    return serve_module(ring=ring, fake_ms=5, environment=environment, is_killed=True)


@pytest.fixture(scope="module")
def real_server(serve_module: Services, ring: Keyring) -> Server:
    """A tiny model, whose steps take longer the more tokens they read."""
    return serve_module(ring=ring, is_killed=True)


def _victim(client: httpx.Client, **body: Any) -> Callable[[], float]:
    """Seconds of one short completion."""

    def send() -> float:
        started = time.perf_counter()
        response = client.post("/complete", json={"prompt": "Hello", "max_tokens": 8, "stream": False, **body})
        assert response.status_code == 200, response.text
        return time.perf_counter() - started

    return send


@pytest.fixture
def client(server: Server, ring: Keyring) -> Iterator[httpx.Client]:
    """The victim's."""
    with httpx.Client(base_url=server.url, headers=ring.headers("victim"), timeout=120) as client:
        yield client


_REFUSED = ("/complete", {f"f{i}": i for i in range(60_000)})
"""Costs nothing but a parser's time."""


def _bodies() -> list[tuple[str, dict[str, Any]]]:
    """The bodies that take longest to parse, to refuse and to answer."""
    plain = {"prompt": "a", "max_tokens": 1, "stream": False}
    return [
        _REFUSED,
        ("/complete", {**plain, "prompt": [7] * (_BYTES // 3)}),
        ("/complete", {**plain, "json_schema": {"a": [[1]] * 32_000}}),
        _REFUSED,
        ("/tokenize", {"prompt": "fox " * (_BYTES // 4)}),
        ("/complete", {**plain, "prompt": ["a"] * 1000}),
        ("/complete", {**plain, "prompt": "fox " * 300, "n": 16, "logprobs": 20, "echo": True, "max_tokens": 50}),
        ("/detokenize", {"tokens": [7] * (_BYTES // 3)}),
        ("/score", {"prompt": "fox " * 1500, "logprobs": 20}),
    ]


def _measured(promise: Promise, what: str, victim: Callable[[], float], load: Load) -> None:
    def measure() -> Cost:
        return cost(victim, load, rounds=promise.size(1, 5), each=promise.size(8, 40))

    found = promise.measured(measure, lambda found: found.ratio <= _TARGET)
    print(what, found)
    promise.at_most(what, found.ratio, target=_TARGET, floor=_FLOOR, n=found.n)


@pytest.fixture
def on_the_loop(server: Server, ring: Keyring) -> Load:
    """Sixteen clients with the worst bodies."""
    return Load(url=server.url, key=ring.keys["attacker"], requests=_bodies(), clients=16)


@pytest.mark.timed
def test_the_worst_bodies_leave_the_event_loop_to_others(
    client: httpx.Client, on_the_loop: Load, promise: Promise
) -> None:
    _measured(promise, "completion concurrent with another tenant's worst bodies", _victim(client), on_the_loop)


def test_bodies_that_are_parsed_as_they_come_are_noticed(
    client: httpx.Client, on_the_loop: Load, faults: Faults
) -> None:
    """Positive control."""
    victim = _victim(client)
    alone = min(victim() for _ in range(5))
    with faults.armed("loop_share.unlimited", "remove"), running(replace(on_the_loop, requests=[_REFUSED], clients=8)):
        assert victim() > _FLOOR * alone


_STREAMS = ("/complete", {"prompt": "Hello", "n": 16, "logprobs": 20, "max_tokens": 200, "ignore_eos": True})
"""Five pages of JSON each step."""


@pytest.mark.timed
def test_streams_with_many_logprobs_leave_the_ipc_to_others(
    client: httpx.Client, server: Server, ring: Keyring, promise: Promise
) -> None:
    load = Load(url=server.url, key=ring.keys["attacker"], requests=[_STREAMS], clients=4)
    victim = _victim(client, max_tokens=32, ignore_eos=True)
    _measured(promise, "completion concurrent with another tenant's streams of 20 log-probabilities", victim, load)


@pytest.mark.timed
def test_a_full_batch_of_long_prompts_leaves_the_engines_steps_to_others(
    real_server: Server, ring: Keyring, promise: Promise
) -> None:
    load = Load(url=real_server.url, key=ring.keys["attacker"], requests=_long_prompts(), clients=16)
    with httpx.Client(base_url=real_server.url, headers=ring.headers("victim"), timeout=120) as client:
        victim = _victim(client, max_tokens=16, ignore_eos=True)
        _measured(promise, "completion concurrent with another tenant's batch of long prompts", victim, load)


def _long_prompts() -> list[tuple[str, dict[str, Any]]]:
    """Prompts that no cache knows."""
    prompts = [[(7 * i + j) % 250 + 40 for j in range(240)] for i in range(200)]
    return [("/complete", {"prompt": prompt, "max_tokens": 4, "stream": False}) for prompt in prompts]


def test_streams_of_the_same_tenant_are_noticed(client: httpx.Client, server: Server, ring: Keyring) -> None:
    """Positive control of the two before: engines take turns by tenant, and here there is only one."""
    victim = _victim(client, max_tokens=32, ignore_eos=True)
    alone = min(victim() for _ in range(3))
    with running(Load(url=server.url, key=ring.keys["victim"], requests=[_STREAMS], clients=16)):
        assert any(victim() > _FLOOR * alone for _ in range(10))  # the first may be answered before the load is there


def _texts(server: Server, ring: Keyring) -> Load:
    """More megabytes than all tenants together may have waiting."""
    requests = [("/tokenize", {"prompt": "fox " * (_BYTES // 4)})]
    return Load(url=server.url, key=ring.keys["attacker"], requests=requests, clients=40)


def test_a_tenant_that_fills_the_memory_for_texts_leaves_space_to_others(
    client: httpx.Client, server: Server, ring: Keyring, promise: Promise
) -> None:
    before = memory(server.process.pid)
    with running(_texts(server, ring)):
        tries = promise.size(2, 20)
        statuses = [_tokenize_a_megabyte(client) for _ in range(tries)]
        grown = memory(server.process.pid) - before
    promise.all_of("megabyte texts read while another tenant fills the queue", statuses.count(200), tries)
    promise.at_most(
        "memory of one tenant's megabyte texts", grown / 2**20, target=256, floor=512, unit="MiB", n=40
    )  # fmt: skip


def test_one_bound_for_the_texts_of_all_tenants_is_noticed(
    client: httpx.Client, server: Server, ring: Keyring, faults: Faults
) -> None:
    """Positive control."""
    with faults.armed("tenant_queue.fifo", "remove"), running(_texts(server, ring), warm_up=2):
        assert _tokenize_a_megabyte(client) == 503


def _tokenize_a_megabyte(client: httpx.Client) -> int:
    with client.stream("POST", "/tokenize", json={"prompt": "fox " * (_BYTES // 4)}) as response:
        return response.status_code
