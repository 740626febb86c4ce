"""With cache blocks for 4 sequences, all of 64 clients finish, with the output that they get without memory pressure.

No sequence is preempted more than four times, and every step makes progress.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from app.common.types import Request, SampledEvent, SamplingParams
from app.engine.scheduling.block_allocator import BlockAllocator
from tests.support.armed_faults import Faults
from tests.support.engine.scheduler_simulation import Delivered, SimulatedDevice, expected_output, make_scheduler, step
from tests.support.model.tiny_models import tiny_decoder, tiny_engine
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services
from tests.support.trials import Trials

CLIENTS, LENGTH, BLOCK = 64, 64, 16
MAX_PREEMPTIONS = 4
"""Maximum number of preemptions of one sequence."""


def _requests(rng: random.Random, *, longest: int, vocab: int) -> list[Request]:
    """All may grow to the same length; short prompts let more be admitted at once."""
    made = []
    for i in range(CLIENTS):
        prompt = tuple(rng.randrange(1, vocab) for _ in range(rng.randint(1, longest // 4)))
        params = SamplingParams(temperature=rng.choice([0.0, 0.9]), seed=i)
        made.append(Request(id=f"r{i}", prompt=prompt, max_tokens=longest - len(prompt), params=params))
    return made


def test_64_simulated_requests_share_blocks_for_four(promise: Promise) -> None:
    """Thousands of cheap steps; the device reads through the block table, and the helper checks every step."""
    trials, worst, n, preemptions = Trials(), 0, 0, 0
    for seed in range(promise.size(4, 100)):
        rng = random.Random(seed)
        requests = _requests(rng, longest=24, vocab=50)
        scheduler, device = make_scheduler(4 * 24 // 2, 2, 64, 32), SimulatedDevice(2)
        delivered = Delivered(requests)
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            delivered.take(step(scheduler, device)[1])
            worst = max([worst, *(s.preemptions for s in [*scheduler.running, *scheduler.waiting])])
        for r in requests:
            trials.compare(expected_output(r).tokens(r.id), delivered.tokens(r.id), seed=seed, request_id=r.id)
        n += len(requests)
        preemptions += scheduler.preemptions
    assert preemptions > n / 4, "the test must cause memory pressure"
    promise.at_most("preemptions of one sequence, in simulation", worst, target=MAX_PREEMPTIONS, n=n)
    promise.all_of("outputs identical to those without memory pressure, in simulation", trials)


@pytest.mark.usefixtures("one_thread")
def test_64_requests_to_a_real_model_share_blocks_for_four(way: str, promise: Promise) -> None:
    decoder = tiny_decoder()
    requests = _requests(random.Random(1), longest=LENGTH, vocab=300)
    reference = tiny_engine(decoder, blocks=1000, max_running=64)
    engine = tiny_engine(decoder, blocks=4 * LENGTH // BLOCK)
    expected: dict[str, list[SampledEvent]] = {r.id: [] for r in requests}
    found: dict[str, list[SampledEvent]] = {r.id: [] for r in requests}
    worst = 0
    for runs, events in ((reference, expected), (engine, found)):
        for request in requests:
            runs.add(request)
        while runs.has_work:
            report = runs.step()
            assert report.events or report.started, "a step without progress"
            assert not runs.scheduler.violations() and not report.failed
            for event in report.events:
                events[event.request_id].append(event)
            worst = max([worst, *(s.preemptions for s in [*runs.scheduler.running, *runs.scheduler.waiting])])
    assert reference.scheduler.preemptions == 0 and engine.scheduler.preemptions > 10
    promise.at_most(f"preemptions of one sequence ({way})", worst, target=MAX_PREEMPTIONS, n=CLIENTS)
    trials = Trials()
    for r in requests:
        trials.compare(expected[r.id], found[r.id], seed=r.params.seed, request_id=r.id)
    promise.all_of(f"outputs identical to those without memory pressure ({way})", trials)


def test_64_clients_over_http_share_blocks_for_four(promise: Promise, serve: Services, faults: Faults) -> None:
    bodies: list[dict[str, object]] = [
        {"prompt": [40 + i, *range(50, 50 + i % 9)], "max_tokens": LENGTH - 1 - i % 9, "seed": i, "user": f"u{i}"}
        for i in range(CLIENTS)
    ]
    flags = ("--max-context", str(LENGTH), "--kv-blocks")
    texts = []
    for blocks in (str(CLIENTS * LENGTH), str(4 * LENGTH // BLOCK)):
        server = serve(*flags, blocks, fake_ms=1, environment=faults.environment)
        texts.append(_all_at_once(server, faults, bodies))
        preemptions = server.metric("preemptions_total")
        assert server.metric("block_violations_total") == 0
        assert server.wait_for(lambda running=server: running.metric("kv_cache_usage_ratio") == 0)  # type: ignore[misc]
    assert preemptions > 10, "the test must cause memory pressure"
    trials = Trials()
    for seed, (expected, got) in enumerate(zip(*texts, strict=True)):
        trials.compare(expected, got, seed=seed, log=server.log)
    promise.all_of("responses over HTTP identical to those without memory pressure", trials)


def _all_at_once(server: Server, faults: Faults, bodies: list[dict[str, object]]) -> list[str]:
    """Slows down steps until all requests have arrived; otherwise fast steps would avoid memory pressure."""

    def ask(body: dict[str, object]) -> str:
        answer = client.post(f"{server.url}/complete", json={**body, "stream": False})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"])

    faults.arm("engine.forward", "sleep", seconds=0.25)
    limits = httpx.Limits(max_connections=CLIENTS)
    with httpx.Client(limits=limits, timeout=60) as client, ThreadPoolExecutor(CLIENTS) as threads:
        answers = threads.map(ask, bodies)
        states = ("requests_running", "requests_waiting")
        assert server.wait_for(lambda: sum(server.metric(name) for name in states) == CLIENTS)
        faults.disarm("engine.forward")
        return list(answers)


def test_blocks_that_are_not_freed_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control: if preemption frees no blocks, the engine stalls or the block check fails."""

    def keep(_self: BlockAllocator, sequence: object) -> None:
        sequence.blocks = ()  # type: ignore[attr-defined]

    monkeypatch.setattr(BlockAllocator, "release", keep)
    scheduler, device = make_scheduler(48, 2, 64, 32), SimulatedDevice(2)
    for request in _requests(random.Random(0), longest=24, vocab=50):
        scheduler.add(request)

    def run() -> None:
        while True:
            step(scheduler, device)

    with pytest.raises((AssertionError, IndexError)):
        run()
