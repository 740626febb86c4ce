"""At ten times the sustainable load goodput hardly falls, and afterwards the service performs as before."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

import pytest

from tests.support.load import open_loop
from tests.support.load.open_loop import Outcome, Plan
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

_SLOTS, _TOKENS, _STEP = 4, 60, 0.005
_CAPACITY = _SLOTS / (_TOKENS * _STEP)
_PATIENCE = 3.0
"""Seconds after which a client discards the response; later responses do not count as goodput.

The last admitted request waits for two rounds of completions and its own, 0.9 s with steps of nominal length: a
machine may be three times slower and still respond in time.
"""
_BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": _TOKENS, "ignore_eos": True}).encode()
_BOUNDED = ("--max-running", str(_SLOTS), "--max-waiting", "8")
_UNBOUNDED = (*_BOUNDED[:2], "--max-waiting", "1000000", "--queue-timeout", "86400", "--max-connections", "10000")


def _offer(server: Server, times: float, seconds: float) -> list[Outcome]:
    plan = Plan(url=server.url, bodies=(_BODY,), rate=times * _CAPACITY, seconds=seconds, patience=_PATIENCE + 1)
    return open_loop.run(plan)


def _goodput(outcomes: list[Outcome], since: float) -> float:
    """Complete and timely responses per second, from `since` seconds after the first arrival to the last one."""
    start, end = outcomes[0].due + since, outcomes[-1].due
    useful = [o for o in outcomes if o.is_good and o.end is not None and o.end <= _PATIENCE]
    return sum(start <= o.due + (o.end or 0) <= end for o in useful) / (end - start)


def _first_token(outcomes: list[Outcome]) -> float:
    return open_loop.summary(outcomes).first_token.p50


class _Overload(NamedTuple):
    """Results of one overload, and the service's capacity for comparison."""

    peak: float
    goodput: float
    recovery_seconds: float
    n: int


def _seconds_until_recovered(server: Server, baseline: float) -> float:
    """Seconds until the median time to first token at low load is back to normal.

    Called after the load generator has received the last responses of the overload.
    """
    began = time.monotonic()
    while time.monotonic() - began < 5:
        outcomes = _offer(server, 0.3, 1)
        if all(o.is_good for o in outcomes) and _first_token(outcomes) <= 2 * baseline + 0.01:
            return outcomes[-1].due - began  # not the time until its load generator ends
    return float("inf")


@pytest.mark.timed
def test_goodput_holds_at_10x_load_and_latency_recovers(serve: Services, promise: Promise) -> None:
    server = serve(*_BOUNDED, fake_ms=_STEP * 1e3)
    seconds = promise.size(3, 30)

    def measure() -> _Overload:
        baseline = _first_token(_offer(server, 0.3, 1.5))
        peak = _goodput(_offer(server, 1.2, seconds + 1), since=1)
        overload = _offer(server, 10, seconds + 1)
        return _Overload(peak, _goodput(overload, since=1), _seconds_until_recovered(server, baseline), len(overload))

    found = promise.measured(
        measure, lambda found: 0 < 0.8 * found.peak <= found.goodput and found.recovery_seconds <= 5
    )
    promise.at_least("goodput at 10x load", found.goodput / found.peak, target=0.9, floor=0.8, n=found.n)
    if promise.full:
        more = _offer(server, 50, seconds)
        promise.at_least("goodput at 50x load", _goodput(more, since=1) / found.peak, target=0.7, n=len(more))
    promise.at_most("time until p50 is back to normal", found.recovery_seconds, target=5, unit="s", n=found.n)


def test_unbounded_queue_collapses(serve: Services, promise: Promise) -> None:
    """Positive control: the same load, with an unbounded queue."""
    server, seconds = serve(*_UNBOUNDED, fake_ms=_STEP * 1e3, is_killed=True), promise.size(6, 20)
    outcomes = _offer(server, 10, seconds)
    late = _goodput(outcomes, since=seconds * 3 / 4) / _CAPACITY
    assert not any(o.is_refused for o in outcomes)
    assert late < 0.3, late
