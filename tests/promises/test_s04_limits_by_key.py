"""Each key has its own limits, and one key's flood does not delay another's first token."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager

import httpx
import msgspec
import pytest

from app.access.api_keys import add_key, new_key, stored
from tests.support.keyed_server import Keyring, bearer
from tests.support.load import open_loop
from tests.support.load.open_loop import Plan
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_SLOTS, _STEP = 16, 0.005
_KEYS = {name: new_key() for name in ("flood", "light", "limited", "reader", "wrong")}
_LIMITS = {"limited": {"concurrency": 12}, "reader": {"requests_per_minute": 3}, "wrong": {"requests_per_minute": 5}}
_SMALL_REQUEST = json.dumps({"prompt": "Hello there", "max_tokens": 10, "ignore_eos": True}).encode()
_FLOOD = json.dumps({"prompt": "Once upon a time", "max_tokens": 100, "ignore_eos": True}).encode()
_RATE = 8.0
"""Requests per second of the light tenant: a tenth of the service's capacity."""


@pytest.fixture(scope="module")
def server(serve_module: Services, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A service with four tenants."""
    ring = Keyring(tmp_path_factory.mktemp("keys") / "keys.json")
    for name, key in _KEYS.items():
        add_key(ring.file, stored(key, name, **_LIMITS.get(name, {})))
    flags = ("--max-running", str(_SLOTS), "--max-waiting", "2048")
    return serve_module(*flags, ring=ring, fake_ms=_STEP * 1e3, is_killed=True)


def _header(name: str) -> tuple[tuple[str, str], ...]:
    return tuple(bearer(_KEYS[name]).items())


def _count(server: Server, state: str) -> float:
    """Number of requests in a state: running or waiting."""
    return server.metric(f"requests_{state}", bearer(_KEYS["light"]))


def _first_tokens(server: Server, seconds: float, name: str) -> list[float]:
    """Seconds to first token for each small request of this tenant."""
    plan = Plan(url=server.url, bodies=(_SMALL_REQUEST,), headers=_header(name), rate=_RATE, seconds=seconds)
    outcomes = open_loop.run(plan)
    assert all(o.is_good for o in outcomes), open_loop.summary(outcomes)
    return [o.first_token for o in outcomes if o.first_token is not None]


def _flood(server: Server, name: str, requests: int, seconds: float) -> AbstractContextManager[open_loop.Load]:
    """Send many requests of one tenant at the same time."""
    at_once = Plan(url=server.url, bodies=(_FLOOD,), rate=1000, seconds=10, most=requests)
    return open_loop.started(msgspec.structs.replace(at_once, headers=_header(name), patience=seconds))


def _has_arrived(server: Server, least: int) -> bool:
    """Whether more than `least` requests wait and no more arrive."""
    before = _count(server, "waiting")
    time.sleep(0.1)
    return least < _count(server, "waiting") <= before


@pytest.mark.timed
def test_1000_waiting_requests_of_one_key_do_not_delay_another(server: Server, promise: Promise) -> None:
    seconds = promise.size(4, 20)

    def measure() -> tuple[float, int]:
        assert server.wait_for(lambda: _count(server, "waiting") == 0)
        alone = open_loop.spread(_first_tokens(server, seconds, "light"))
        # The service completes 32 per second, also while a slow machine still sends; 1,300 leave ten seconds.
        with _flood(server, "flood", 1300, seconds + 60):
            assert server.wait_for(lambda: _has_arrived(server, 1000))
            loaded = open_loop.spread(_first_tokens(server, seconds, "light"))
            assert _count(server, "waiting") > 500
        # Below 20 ms noise of the machine dominates; a first token takes at least two steps.
        return loaded.p99 / max(alone.p99, 0.02), loaded.n

    ratio, n = promise.measured(measure, lambda found: found[0] <= 3)
    promise.at_most(
        "first-token p99 beside another key's 1,000 requests, relative to alone", ratio, target=3, floor=3, n=n
    )


def test_tenant_waits_behind_its_own_flood(server: Server) -> None:
    """Positive control: the same flood by the same tenant."""
    assert server.wait_for(lambda: _count(server, "waiting") == 0)
    with _flood(server, "flood", 800, 60):
        assert server.wait_for(lambda: _count(server, "waiting") > 300)
        plan = Plan(url=server.url, bodies=(_SMALL_REQUEST,), rate=_RATE, seconds=1, patience=2)
        plan = msgspec.structs.replace(plan, headers=_header("flood"))
        waited = [o.first_token or 99 for o in open_loop.run(plan)]
    assert open_loop.spread(waited).p50 > 0.5


def test_concurrency_limit_of_a_key_is_never_exceeded(server: Server, promise: Promise) -> None:
    assert server.wait_for(lambda: _count(server, "waiting") + _count(server, "running") == 0)
    with _flood(server, "limited", 60, 5) as load:
        most, end = 0.0, time.monotonic() + 1.5
        while time.monotonic() < end:
            most = max(most, _count(server, "running") + _count(server, "waiting"))
        summary = open_loop.summary(load.outcomes())
    assert set(summary.statuses) == {200, 429} and summary.good >= 12
    promise.at_most("concurrent requests of a key that may have 12", most, target=12, n=summary.offered)


def test_tokenize_routes_count_as_requests(server: Server) -> None:
    requests_sent = [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [40]}),
        ("/tokenize", {"prompt": "b"}),
    ] * 2
    answers = [
        httpx.post(f"{server.url}{path}", json=body, headers=bearer(_KEYS["reader"])) for path, body in requests_sent
    ]
    assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 3
    assert int(answers[-1].headers["retry-after"]) >= 1


def test_invalid_requests_count_and_are_not_read_without_a_request_left(server: Server) -> None:
    with httpx.Client(base_url=server.url, headers=bearer(_KEYS["wrong"]), timeout=60) as client:
        json_type = {"Content-Type": "application/json"}
        bodies = (b"{", b'{"x": 1}', b'{"prompt": 1}', b'{"prompt": "a", "logit_bias": {"x": 1}}', b"[]")
        paths = ("/complete", "/v1/completions", "/score", "/complete", "/tokenize")
        for path, body in zip(paths, bodies, strict=True):
            assert client.post(path, content=body, headers=json_type).status_code in (200, 400)
        refused = [client.post("/complete", content=body, headers=json_type) for body in (b"{", b" " * (1 << 19))]
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in refused] == [
        (429, "rate_limit_exceeded")
    ] * 2
