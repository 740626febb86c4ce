"""Sixteen prompts of a megabyte next to a full batch delay neither the event loop nor a health check."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.armed_faults import Faults
from tests.support.load import open_loop
from tests.support.load.open_loop import Plan
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_SLOTS = 32
_LONG: dict[str, Any] = {
    "prompt": "Once upon a time there was a fox. " * 30_000,  # 1,020,000 bytes
    "truncate_prompt_tokens": 2000,
    "max_tokens": 4,
    "stream": False,
}
_STREAM = json.dumps({"prompt": "Hello", "max_tokens": 200, "ignore_eos": True, "seed": 0}).encode()


@pytest.fixture
def server(serve: Services, faults: Faults) -> Server:
    """A service with capacity for the whole load."""
    flags = ("--max-running", str(_SLOTS), "--max-waiting-tokens", "100000000")
    return serve(*flags, fake_ms=5, environment=faults.removing("long_texts.on_loop"), is_killed=True)


def _lags(server: Server) -> dict[float, float]:
    """Cumulative histogram of event loop lag: upper bound in seconds -> count."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    found = re.findall(r'^inkstream_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)$', text, re.MULTILINE)
    return {float(bound): float(count) for bound, count in found}


def _p99(before: dict[float, float], after: dict[float, float]) -> tuple[float, int]:
    """The smallest bound that covers 99% of the timers, and the number of timers."""
    new = {bound: after[bound] - before[bound] for bound in after}
    total = max(new.values())
    return min(bound for bound, count in new.items() if count >= 0.99 * total), int(total)


def _measure(server: Server, prompts: int, seconds: float) -> tuple[float, int, open_loop.Spread, set[int]]:
    """Loop lag p99 and its n, and times and statuses of health checks, during a full batch and long prompts."""
    batch = Plan(url=server.url, bodies=(_STREAM,), rate=_SLOTS / 1.2, seconds=seconds + 1)
    checks = Plan(url=server.url, bodies=(), path="/health/live", rate=50, seconds=seconds)

    def send(number: int) -> int:
        # /complete may truncate and tokenizes only the prompt's end; /tokenize reads all of it.
        if number % 2:
            return httpx.post(f"{server.url}/complete", json=_LONG, timeout=300).status_code
        return httpx.post(f"{server.url}/tokenize", json={"prompt": _LONG["prompt"]}, timeout=300).status_code

    with open_loop.started(batch), ThreadPoolExecutor(16) as threads:
        time.sleep(1)
        before = _lags(server)
        with open_loop.started(checks) as health:
            statuses = list(threads.map(send, range(prompts)))
            answers = health.outcomes()
        after = _lags(server)
    assert set(statuses) <= {200, 503} and statuses.count(200) >= min(prompts, 8), statuses
    return *_p99(before, after), open_loop.spread(o.end for o in answers if o.end), {o.status for o in answers}


@pytest.mark.timed
def test_long_prompts_and_a_full_batch_do_not_block_the_event_loop(server: Server, promise: Promise) -> None:
    lag, n, health, statuses = promise.measured(
        lambda: _measure(server, promise.size(10, 64), promise.size(4, 30)),
        lambda found: found[0] <= 0.05 and found[2].p99 <= 0.1,
    )
    assert statuses == {200}
    promise.at_most("event loop lag p99 (upper bound of its bucket)", lag, target=0.02, floor=0.05, unit="s", n=n)
    promise.at_most("GET /health/live p99", health.p99, target=0.05, floor=0.1, unit="s", n=health.n)


def test_tokenizing_long_prompts_on_the_event_loop_is_detected(server: Server, faults: Faults) -> None:
    """Positive control. On a busy machine some health checks get no response in time."""
    faults.arm("long_texts.on_loop", "yes")
    lag, _, health, _ = _measure(server, 8, 3)
    assert lag > 0.05
    assert health.most > 0.1
