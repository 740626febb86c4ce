"""The same request gives the same output under any load: batches, preemption, cache hits and disconnecting clients."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from app.common.types import Request
from app.engine.execution.engine import Engine
from tests.support.engine.mixed_requests import Outcome, mixed_requests
from tests.support.model.tiny_models import tiny_decoder, tiny_engine
from tests.support.promise_figures import Promise
from tests.support.trials import Trials

pytestmark = pytest.mark.usefixtures("one_thread")
ROUND = 67
"""Requests per round."""
BLOCKS = 20
"""Cache blocks: enough for three to six requests."""


@dataclass(slots=True)
class Load:
    """What happened to the requests."""

    preemptions: int = 0
    cached_tokens: int = 0
    most_running: int = 0
    disconnected: set[str] = field(default_factory=set)


def _requests(seed: int) -> Iterator[Request]:
    """Requests with IDs per round; half of them share a cache namespace and its blocks."""
    for request in mixed_requests(ROUND, seed=seed, longest=48, max_tokens=60):
        leader = f"{seed}/{request.leader}" if request.leader else None
        yield msgspec.structs.replace(request, id=f"{seed}/{request.id}", leader=leader)


def _alone(engine: Engine, request: Request) -> Outcome:
    """Alone in the engine, in a cache namespace without cached blocks."""
    engine.add(msgspec.structs.replace(request, leader=None, cache_namespace=request.id))
    outcome = Outcome()
    while engine.has_work:
        report = engine.step()
        outcome.events += report.events
        outcome.scores += [token for scored in report.scores for token in scored.tokens]
    return outcome


def _together(engine: Engine, requests: list[Request], rng: random.Random, load: Load) -> dict[str, Outcome]:
    """Requests arrive at any time, and one client in ten disconnects at any time."""
    outcomes = {request.id: Outcome() for request in requests}
    todo, preemptions = requests[::-1], engine.scheduler.preemptions
    while todo or engine.has_work:
        while todo and rng.random() < 0.6:
            engine.add(todo.pop())
        if rng.random() < 0.05:
            request_id = rng.choice(requests).id
            engine.cancel(request_id)
            todo = [request for request in todo if request.id != request_id]
            load.disconnected.add(request_id)
        if engine.has_work:
            report = engine.step(lambda started: _note(load, sum(s.cached_tokens for s in started)))
            assert not engine.scheduler.violations() and not report.failed
            load.most_running = max(load.most_running, report.counters.running)
            for event in report.events:
                outcomes[event.request_id].events.append(event)
            for scored in report.scores:
                outcomes[scored.request_id].scores += scored.tokens
    load.preemptions += engine.scheduler.preemptions - preemptions
    return outcomes


def _note(load: Load, cached_tokens: int) -> None:
    load.cached_tokens += cached_tokens


def _expected(one: Outcome, alone: Outcome, *, disconnected: bool) -> Outcome:
    """What a request must give; a disconnected client has a prefix."""
    if disconnected:
        return Outcome(alone.events[: len(one.events)], alone.scores[: len(one.scores)], one.failures)
    return alone


def _parts(one: Outcome) -> dict[str, list[Any]]:
    return {"events": one.events, "scores": one.scores, "failures": one.failures}


def _compare(rounds: int, load: Load) -> Trials:
    decoder = tiny_decoder()
    busy = tiny_engine(decoder, blocks=BLOCKS, tokens_per_step=48, max_running=12)
    quiet = tiny_engine(decoder, blocks=BLOCKS)
    trials = Trials()
    for seed in range(rounds):
        requests = list(_requests(seed))
        outcomes = _together(busy, requests, random.Random(seed), load)
        for r in requests:
            one = outcomes[r.id]
            expected = _expected(one, _alone(quiet, r), disconnected=r.id in load.disconnected)
            trials.compare(_parts(expected), _parts(one), seed=seed, request_id=r.id)
    return trials


def test_output_under_load_equals_output_alone(way: str, promise: Promise) -> None:
    rounds, load = promise.size(2, 50), Load()
    trials = _compare(rounds, load)
    assert load.preemptions > rounds and load.cached_tokens > 100 * rounds and load.most_running >= 6, load
    assert len(load.disconnected) > rounds
    promise.all_of(f"outputs under load identical to those alone ({way})", trials)


def test_batch_dependent_random_draws_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: a shared random generator, whose draws depend on the batch."""
    generator = random.Random(0)
    monkeypatch.setattr("app.engine.sampling.sampler.uniforms", lambda draws: [generator.random() for _ in draws])
    load = Load()
    assert _compare(1, load).good < ROUND
