"""Under any load a bounded number of requests waits, and the service refuses all others at once with Retry-After."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.load import open_loop
from tests.support.load.open_loop import Plan
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_SLOTS, _TOKENS, _STEP, _QUEUE = 4, 160, 0.005, 12
_CAPACITY = _SLOTS / (_TOKENS * _STEP)
"""Requests a second; more than there can be, as a step takes a little longer.

Few, so that ten times as many do not overload the cores: the queue should be the bottleneck.
"""
_BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": _TOKENS, "ignore_eos": True}).encode()


@pytest.fixture(scope="module")
def server(serve_module: Services) -> Server:
    """Four texts at a time, twelve that wait."""
    flags = ("--max-running", str(_SLOTS), "--max-waiting", str(_QUEUE), "--max-waiting-tokens", "20000")
    return serve_module(*flags, fake_ms=_STEP * 1e3)


def _overloaded(server: Server, seconds: float) -> tuple[list[float], list[open_loop.Outcome]]:
    """How many waited at each look, and the outcomes of the requests."""
    # Admitted requests are written to their end, on a machine of any speed: it takes 3 s on a fast one.
    plan = Plan(url=server.url, bodies=(_BODY,), rate=10 * _CAPACITY, seconds=seconds, patience=60)
    waiting, end = [], time.monotonic() + seconds
    with open_loop.started(plan) as load:
        while time.monotonic() < end:
            waiting.append(server.metric("requests_waiting"))
            time.sleep(0.05)
        return waiting, load.outcomes()


@pytest.mark.timed
def test_at_ten_times_the_load_the_queue_is_bounded_and_refusals_are_quick(server: Server, promise: Promise) -> None:
    seconds = promise.size(4, 60)
    waiting, outcomes = promise.measured(
        lambda: _overloaded(server, seconds), lambda found: open_loop.summary(found[1]).refusal.p99 <= 0.1
    )
    summary = open_loop.summary(outcomes)
    assert set(summary.statuses) == {200, 503} and not summary.errors, summary
    assert summary.good > _CAPACITY * seconds / 3
    promise.at_most("requests waiting at 10x load", max(waiting), target=_QUEUE, n=len(waiting))
    promise.at_most("refusal p99", summary.refusal.p99, target=0.02, floor=0.1, unit="s", n=summary.refused)
    waits = [o.retry_after for o in outcomes if o.is_refused]
    promise.all_of("refusals with Retry-After from 1 to 120 s", sum(1 <= (w or 0) <= 120 for w in waits), len(waits))


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
    promise.at_most("Retry-After against the queue's real wait", retry_after / took, target=2, floor=3, n=n)
    promise.at_least("Retry-After against the queue's real wait, low", retry_after / took, target=0.7, floor=0.5, n=n)


def test_long_texts_are_refused_before_they_are_read_where_the_queue_is_full_of_tokens(server: Server) -> None:
    """Each alone may be read, and is found to be too long; two at a time are more than may wait."""
    body: dict[str, Any] = {"prompt": "fox" * 30_000, "max_tokens": 1, "stream": False}

    def ask(_: int) -> int:
        return httpx.post(f"{server.url}/complete", json=body, timeout=60).status_code

    with ThreadPoolExecutor(16) as threads:
        statuses = list(threads.map(ask, range(48)))
    assert set(statuses) == {400, 503}, statuses
    assert httpx.post(f"{server.url}/complete", json={"prompt": "a", "max_tokens": 1}, timeout=60).status_code == 200
