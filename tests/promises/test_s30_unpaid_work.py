"""S30: Work that no quota charges (metrics, documents, refusals, resumes) makes another key's completion take at most
twice as long, and holds little memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.completion_client import parse_events
from tests.support.http.raw_client import connect
from tests.support.keyed_server import Keyring, raw_request
from tests.support.load.noisy_neighbor import Cost, Load, measure_cost, running_load
from tests.support.processes import memory
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_TARGET, _FLOOR = 2, 3
_PROTECTIONS = ("metrics.unlimited", "replay.copied", "documents.on_loop")
_GETS = ("/v1/models", "/tokenizer_info", "/openapi.json", "/docs", "/", "/web/none", "/none", "/complete/x/events")
_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/complete", {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(300)}}),
    ("/complete", {"prompt": "a", **{f"f{i}": 1 for i in range(250)}}),
    ("/complete", {f"f{i}": 1 for i in range(85_000)}),
    ("/detokenize", {"tokens": [1.0] * 200_000 + [0.5]}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {f"{i}": "x" for i in range(90_000)}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 400_000}]}),
    ("/score", {"prompt": [["a"]] * 16_000}),
]
_CONNECTIONS = 400
_STREAM = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "logprobs": 5}
"""Its events fill most of --resume-bytes."""


@pytest.fixture(scope="module")
def server(serve_module: Services, ring: Keyring, faults: Faults) -> Server:
    """The fake engine."""
    return serve_module(ring=ring, fake_ms=5, environment=faults.removing(*_PROTECTIONS), is_killed=True)


@pytest.fixture
def victim(server: Server, ring: Keyring) -> Iterator[Callable[[], float]]:
    """Seconds of one short completion."""
    with httpx.Client(base_url=server.url, headers=ring.headers("victim"), timeout=120) as client:

        def complete() -> float:
            started = time.perf_counter()
            body = {"prompt": "Hello", "max_tokens": 8, "stream": False}
            assert client.post("/complete", json=body).status_code == 200
            return time.perf_counter() - started

        yield complete


def _load(server: Server, ring: Keyring, kind: str) -> Load:
    """As many requests as are answered; of documents 160 a second: more would measure how quickly HTTP is served."""
    load = partial(Load, url=server.url, key=ring.keys["attacker"])
    match kind:
        case "metrics":
            return load(requests=[("/metrics", None)], method="GET", clients=32)
        case "documents":
            return load(requests=[(path, None) for path in _GETS], method="GET", clients=8, pause=0.05)
    return load(requests=_REFUSED, clients=8)


@pytest.mark.timed
@pytest.mark.parametrize("kind", ["metrics", "documents", "refusals"])
def test_unpaid_requests_cost_another_key_little(
    kind: str, server: Server, ring: Keyring, victim: Callable[[], float], promise: Promise
) -> None:
    def measure() -> Cost:
        load = _load(server, ring, kind)
        return measure_cost(victim, load, rounds=promise.size(1, 5), each=promise.size(12, 40))

    found = promise.measured(measure, lambda found: found.ratio <= _TARGET)
    print(kind, found)
    what = f"completion concurrent with another key's flood of {kind}"
    promise.at_most(what, found.ratio, target=_TARGET, floor=_FLOOR, n=found.n)


def test_metrics_rendered_for_each_request_are_detected(
    server: Server, ring: Keyring, victim: Callable[[], float], faults: Faults
) -> None:
    """Positive control."""
    alone = min(victim() for _ in range(5))
    with faults.armed("metrics.unlimited", "remove"), running_load(_load(server, ring, "metrics")):
        assert any(victim() > _FLOOR * alone for _ in range(5))


def _finished_stream(server: Server, ring: Keyring) -> str:
    """The id of a stream that its client has read."""
    answer = httpx.post(f"{server.url}/complete", json=_STREAM, headers=ring.headers("attacker"), timeout=120)
    assert parse_events(answer.text)[-1].name == "done"
    return answer.headers["x-request-id"]


def _memory_of_unread_resumes(server: Server, ring: Keyring) -> int:
    """Bytes that the API process grows by, with unread resumes of four streams on 400 connections."""
    names = [_finished_stream(server, ring) for _ in range(4)]
    header = ": ".join(*ring.headers("attacker").items())
    before = memory(server.process.pid)
    with contextlib.ExitStack() as stack:
        for number in range(_CONNECTIONS):
            connection = stack.enter_context(connect(server, receive_buffer=4096))
            target = f"/complete/{names[number % 4]}/events?after=-1"
            connection.sendall(raw_request("GET", target, "Host: localhost", header))
            connection.recv(1)
        time.sleep(0.5)
        return memory(server.process.pid) - before


def test_unread_resumes_hold_little_memory(server: Server, ring: Keyring, promise: Promise) -> None:
    grown = _memory_of_unread_resumes(server, ring)
    what = "memory of 400 resumes that are not read"
    promise.at_most(what, grown / 2**20, target=48, floor=64, unit="MiB", n=_CONNECTIONS)


def test_copy_of_the_stream_for_each_resume_is_detected(server: Server, ring: Keyring, faults: Faults) -> None:
    """Positive control."""
    with faults.armed("replay.copied", "remove"):
        assert _memory_of_unread_resumes(server, ring) > 64 << 20


def _worst_gap_beside_first_documents(server: Server, ring: Keyring) -> float:
    """Largest gap between the tokens of a stream of one key while another key asks for each document."""
    body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}
    gaps: list[float] = []

    def ask() -> None:
        time.sleep(0.3)
        for path in ("/openapi.json", "/", "/docs"):
            assert httpx.get(f"{server.url}{path}", headers=ring.headers("attacker"), timeout=60).status_code == 200

    asking = threading.Thread(target=ask)
    with httpx.stream(
        "POST", f"{server.url}/complete", json=body, headers=ring.headers("victim"), timeout=60
    ) as response:
        asking.start()
        last = None
        for _ in response.iter_raw():
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
    asking.join()
    return max(gaps)


@pytest.mark.timed
def test_first_documents_do_not_stop_streams(serve_module: Services, ring: Keyring, promise: Promise) -> None:
    def measure() -> float:
        return _worst_gap_beside_first_documents(serve_module(ring=ring, fake_ms=5), ring)

    gap = promise.measured(measure, lambda gap: gap <= 0.05)
    promise.at_most("longest gap of a stream beside the first documents", gap, target=0.05, floor=0.15, unit="s", n=3)


def test_documents_made_on_the_event_loop_are_detected(server: Server, ring: Keyring, faults: Faults) -> None:
    """Positive control."""
    with faults.armed("documents.on_loop", "remove"):
        assert max(_worst_gap_beside_first_documents(server, ring) for _ in range(3)) > 0.05
