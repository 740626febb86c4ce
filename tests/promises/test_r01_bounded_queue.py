"""Under any load a bounded number of requests waits, and the service refuses all others at once with Retry-After."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.load import open_loop
from tests.support.load.open_loop import Plan
from tests.support.promise_figures import Promise
from tests.support.servers import Server, is_clean, start_server, stop_server

_SLOTS, _TOKENS, _STEP, _QUEUE = 4, 160, 0.005, 12
_CAPACITY = _SLOTS / (_TOKENS * _STEP)
"""Requests a second; more than there can be, as a step takes a little longer.

Few, so that ten times as many do not overload the cores: the queue should be the bottleneck.
"""
_BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": _TOKENS, "ignore_eos": True}).encode()
_QUOTAS = {"ann": {"requests_per_minute": 5}, "bob": {"tokens_per_minute": 3000}, "cyd": {"concurrency": 1}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Iterator[Server]:
    """Four texts at a time, twelve that wait."""
    running = start_server(
        tmp_path_factory.mktemp("r1"),
        weights,
        *("--max-running", str(_SLOTS), "--max-waiting", str(_QUEUE), "--max-waiting-tokens", "20000"),
        fake_ms=_STEP * 1e3,
        environment={"CALLERS": json.dumps(_QUOTAS)},
    )
    yield running
    assert stop_server(running) == 0


def _deepest(server: Server, load: open_loop.Load) -> tuple[float, int]:
    """The most that waited at any look, while the load lasts."""
    deepest, looks, end = 0.0, 0, time.monotonic() + load.seconds
    while time.monotonic() < end:
        deepest = max(deepest, server.metric("requests_waiting"))
        looks += 1
        time.sleep(0.05)
    return deepest, looks


def _overloaded(server: Server, seconds: float) -> tuple[float, int, list[open_loop.Outcome]]:
    """Longest queue, number of samples, and the outcomes of the requests."""
    # Admitted requests are written to their end, on a machine of any speed: it takes 3 s on a fast one.
    plan = Plan(url=server.url, bodies=(_BODY,), rate=10 * _CAPACITY, seconds=seconds, patience=60)
    with open_loop.started(plan) as load:
        deepest, looks = _deepest(server, load)
        return deepest, looks, load.outcomes()


@pytest.mark.timed
def test_at_ten_times_the_load_the_queue_is_bounded_and_refusals_are_quick(server: Server, promise: Promise) -> None:
    seconds = promise.size(4, 60)
    deepest, looks, outcomes = promise.measured(
        lambda: _overloaded(server, seconds), lambda found: open_loop.summary(found[2]).refusal.p99 <= 0.1
    )
    summary = open_loop.summary(outcomes)
    assert set(summary.statuses) == {200, 503} and not summary.errors, summary
    assert summary.good > _CAPACITY * seconds / 3
    promise.at_most("R1", "requests waiting at 10x load", deepest, target=_QUEUE, n=looks)
    promise.at_most("R1", "refusal p99", summary.refusal.p99, target=0.02, floor=0.1, unit="s", n=summary.refused)
    waits = [o.retry_after for o in outcomes if o.is_refused]
    promise.all_of(
        "R1", "refusals with Retry-After from 1 to 120 s", sum(1 <= (w or 0) <= 120 for w in waits), len(waits)
    )


def test_retry_after_tells_how_long_the_queue_takes(server: Server, promise: Promise) -> None:
    """Long texts, so that waits are measurable: as long as those of requests admitted at the same time."""
    body = json.dumps({"prompt": "Once", "max_tokens": 250, "ignore_eos": True}).encode()

    def measure() -> tuple[float, float, int]:
        outcomes = open_loop.run(Plan(url=server.url, bodies=(body,), rate=25.0, seconds=5, patience=60))
        late = [o for o in outcomes if o.is_refused and o.due > outcomes[0].due + 2.5]
        waits = [o.first_token for o in outcomes if o.is_good and o.first_token and o.due > outcomes[0].due + 2.5]
        assert late and waits
        return sum(o.retry_after or 0 for o in late) / len(late), sum(waits) / len(waits), len(late)

    retry_after, took, n = promise.measured(measure, lambda found: 0.5 <= found[0] / found[1] <= 3)
    promise.at_most("R1", "Retry-After against the queue's real wait", retry_after / took, target=2, floor=3, n=n)
    promise.at_least(
        "R1", "Retry-After against the queue's real wait, low", retry_after / took, target=0.7, floor=0.5, n=n
    )


def test_long_texts_are_refused_before_they_are_read_where_the_queue_is_full_of_tokens(server: Server) -> None:
    """Each alone may be read, and is found to be too long; two at a time are more than may wait."""
    body: dict[str, Any] = {"prompt": "fox" * 30_000, "max_tokens": 1, "stream": False}

    def ask(_: int) -> int:
        return httpx.post(f"{server.url}/complete", json=body, timeout=60).status_code

    with ThreadPoolExecutor(16) as threads:
        statuses = list(threads.map(ask, range(48)))
    assert set(statuses) == {400, 503}, statuses
    assert httpx.post(f"{server.url}/complete", json={"prompt": "a", "max_tokens": 1}, timeout=60).status_code == 200


def _ask(server: Server, name: str, **body: Any) -> httpx.Response:
    return httpx.post(
        f"{server.url}/complete",
        json={"prompt": "a", "max_tokens": 1, "stream": False, "ignore_eos": True, **body},
        headers={"X-Caller": name},
        timeout=60,
    )


def test_over_a_quota_of_requests_a_key_is_told_429(server: Server) -> None:
    began = time.monotonic()
    answers = [_ask(server, "ann") for _ in range(7)]
    took = time.monotonic() - began
    assert [a.status_code for a in answers] == [200] * 5 + [429] * 2
    error = answers[-1].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "5 requests a minute" in error["message"]
    assert 60 - took <= int(answers[-1].headers["retry-after"]) <= 61
    assert _ask(server, "").status_code == 200


def test_over_a_quota_of_tokens_a_key_is_told_429_and_never_fits_is_400(server: Server) -> None:
    assert _ask(server, "bob", max_tokens=3001).status_code == 400
    # The text ends at its deadline, long before its end: what was not written is given back.
    assert _ask(server, "bob", max_tokens=2900, deadline_ms=1000).json()["choices"][0]["finish_reason"] == "timeout"
    assert _ask(server, "bob", max_tokens=150).status_code == 200
    refused = _ask(server, "bob", max_tokens=2900)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1


def _start_and_disconnect(server: Server, *, stream: bool) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /complete HTTP/1.1\r\nHost: {host}\r\nX-Caller: cyd\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        # Before that this test's request would take its slot, and the service would refuse the client's.
        assert server.wait_for(lambda: server.metric("requests_running") == 1)
        refused = _ask(server, "cyd")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"


@pytest.mark.timed
def test_requests_at_a_time_are_let_go_when_a_client_leaves(server: Server) -> None:
    for stream in (True, False, True):
        _start_and_disconnect(server, stream=stream)  # a text of 40 s
        assert server.wait_for(lambda: _ask(server, "cyd").status_code == 200, 2)
        assert is_clean(server, 20)
