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
"""Requests per second; an upper bound, because steps take slightly longer.

It is low, so that ten times this rate does not overload the cores: the queue should be the bottleneck.
"""
_BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": _TOKENS, "ignore_eos": True}).encode()


@pytest.fixture(scope="module")
def server(serve_module: Services) -> Server:
    """Four running and twelve waiting requests at most."""
    flags = ("--max-running", str(_SLOTS), "--max-waiting", str(_QUEUE), "--max-waiting-tokens", "20000")
    return serve_module(*flags, fake_ms=_STEP * 1e3)


def _measure_overload(server: Server, seconds: float) -> tuple[list[float], list[open_loop.Outcome]]:
    """Number of waiting requests in each sample, and the outcomes of all requests."""
    # Admitted requests finish on a machine of any speed: this takes 3 s on a fast one.
    plan = Plan(url=server.url, bodies=(_BODY,), rate=10 * _CAPACITY, seconds=seconds, patience=60)
    waiting, end = [], time.monotonic() + seconds
    with open_loop.started(plan) as load:
        while time.monotonic() < end:
            waiting.append(server.metric("requests_waiting"))
            time.sleep(0.05)
        return waiting, load.outcomes()


@pytest.mark.timed
def test_queue_is_bounded_and_refusals_are_fast_at_10x_load(server: Server, promise: Promise) -> None:
    seconds = promise.size(4, 60)
    waiting, outcomes = promise.measured(
        lambda: _measure_overload(server, seconds), lambda found: open_loop.summary(found[1]).refusal.p99 <= 0.1
    )
    summary = open_loop.summary(outcomes)
    assert set(summary.statuses) == {200, 503} and not summary.errors, summary
    assert summary.good > _CAPACITY * seconds / 3
    promise.at_most("requests waiting at 10x load", max(waiting), target=_QUEUE, n=len(waiting))
    promise.at_most("refusal p99", summary.refusal.p99, target=0.02, floor=0.1, unit="s", n=summary.refused)
    waits = [o.retry_after for o in outcomes if o.is_refused]
    promise.all_of("refusals with Retry-After from 1 to 120 s", sum(1 <= (w or 0) <= 120 for w in waits), len(waits))


def test_retry_after_estimates_the_queue_wait(server: Server, promise: Promise) -> None:
    """Long completions make waits measurable; compares with the waits of requests admitted at the same time."""
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


def test_long_prompts_are_refused_untokenized_when_the_token_queue_is_full(server: Server) -> None:
    """One such prompt is tokenized and rejected as too long; two at a time exceed the queue's token limit."""
    body: dict[str, Any] = {"prompt": "fox" * 30_000, "max_tokens": 1, "stream": False}

    def ask(_: int) -> int:
        return httpx.post(f"{server.url}/complete", json=body, timeout=60).status_code

    with ThreadPoolExecutor(16) as threads:
        statuses = list(threads.map(ask, range(48)))
    assert set(statuses) == {400, 503}, statuses
    assert httpx.post(f"{server.url}/complete", json={"prompt": "a", "max_tokens": 1}, timeout=60).status_code == 200
