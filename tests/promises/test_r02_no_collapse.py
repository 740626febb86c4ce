"""Ten times the load that can be borne costs hardly any useful work, and when it is over all is as before."""

from __future__ import annotations

import json
import time
from pathlib import Path

import open_loop
from conftest import Server, start_server, stop_server
from open_loop import Outcome, Plan
from promise import Promise

_SLOTS, _TOKENS, _STEP = 8, 120, 0.005
_CAPACITY = _SLOTS / (_TOKENS * _STEP)
_PATIENCE = 3.0
"""Seconds after which nobody wants the answer any more: what ends later is no goodput."""
_BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": _TOKENS, "ignore_eos": True}).encode()
_BOUNDED = ("--max-waiting", "16")
_UNBOUNDED = ("--max-waiting", "1000000", "--queue-timeout", "86400")


def _start(folder: Path, weights: Path, *flags: str) -> Server:
    return start_server(folder, weights, "--max-running", str(_SLOTS), *flags, fake_ms=_STEP * 1e3)


def _offer(server: Server, times: float, seconds: float) -> list[Outcome]:
    plan = Plan(url=server.url, bodies=(_BODY,), rate=times * _CAPACITY, seconds=seconds, patience=_PATIENCE + 1)
    return open_loop.run(plan)


def _goodput(outcomes: list[Outcome], since: float) -> float:
    """Answers a second that came whole and in time, from `since` seconds after the first arrival to the last one."""
    start, end = outcomes[0].due + since, outcomes[-1].due
    useful = [o for o in outcomes if o.is_good and o.end is not None and o.end <= _PATIENCE]
    return sum(start <= o.due + (o.end or 0) <= end for o in useful) / (end - start)


def _first_token(outcomes: list[Outcome]) -> float:
    return open_loop.summary(outcomes).first_token.p50


def test_goodput_stays_at_ten_times_the_load_and_quiet_comes_back(
    tmp_path: Path, weights: Path, promise: Promise
) -> None:
    server = _start(tmp_path, weights, *_BOUNDED)
    seconds = promise.size(3, 30)
    quiet = _first_token(_offer(server, 0.3, 1.5))

    def measure() -> tuple[float, float, list[Outcome]]:
        peak = _goodput(_offer(server, 1.2, seconds + 1), since=1)
        overload = _offer(server, 10, seconds + 1)
        return peak, _goodput(overload, since=1), overload

    peak, tenfold, overload = promise.measured(measure, lambda found: found[1] / found[0] >= 0.8)
    promise.at_least("R2", "goodput at 10x load", tenfold / peak, target=0.9, floor=0.8, n=len(overload))
    if promise.full:
        more = _offer(server, 50, seconds)
        promise.at_least("R2", "goodput at 50x load", _goodput(more, since=1) / peak, target=0.7, n=len(more))
    # The generator waited for the last answers: what came in during the overload is done with by now.
    end, calm = time.monotonic(), False
    while not calm and time.monotonic() - end < 5:
        calm = _first_token(_offer(server, 0.3, 1)) <= 2 * quiet + 0.01
    promise.at_most("R2", "until p50 is back", time.monotonic() - end, target=5, unit="s", n=len(overload))
    assert stop_server(server) == 0


def test_a_queue_without_bound_collapses(tmp_path: Path, weights: Path, promise: Promise) -> None:
    """Positive control: the same load, and everybody waits."""
    server = _start(tmp_path, weights, *_UNBOUNDED)
    try:
        seconds = promise.size(6, 20)
        outcomes = _offer(server, 10, seconds)
        late = _goodput(outcomes, since=seconds * 3 / 4) / _CAPACITY
        assert not any(o.is_refused for o in outcomes)
        assert late < 0.3, late
    finally:
        server.process.kill()
        server.process.wait()


def test_nobody_is_let_in_who_could_not_write_much(tmp_path: Path, weights: Path) -> None:
    """A long queue and short deadlines: whoever would begin after half of its time is refused at once."""
    server = _start(tmp_path, weights, *_UNBOUNDED)
    try:
        body = _BODY[:-1] + b', "deadline_ms": 3000}'
        plan = Plan(url=server.url, bodies=(body,), rate=10 * _CAPACITY, seconds=7.5, patience=_PATIENCE + 1)
        outcomes = open_loop.run(plan)
        assert sum(o.is_refused for o in outcomes) > len(outcomes) / 2
        assert {o.retry_after is not None and 1 <= o.retry_after <= 120 for o in outcomes if o.is_refused} == {True}
        # Those of the first second came before there was a pace to judge by; they are gone by then.
        assert _goodput(outcomes, since=5) / _CAPACITY > 0.5
    finally:
        server.process.kill()
        server.process.wait()
