"""Engine pool: what each engine is sent, and recovery when one crashes or is abandoned.

The clients are real; the test plays the engines, which choose tokens by a hash of all earlier ones, as a model does.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from app.api.metrics import EngineState
from app.common.cpu_topology import Core, EngineShare, Topology
from app.common.errors import EngineFailed, NotReady, QueueFull
from app.common.ipc import Submit
from app.common.model_version import Version
from app.common.settings import Settings
from app.common.types import Counters, Request, RequestStarted, StepReport
from app.engine_client.canary import CANARY_ID, Canary
from app.engine_client.prefix_router import PrefixRouter, block_hashes
from app.engine_client.supervisor import EngineStopped
from app.generation.completion import MAX_BUFFERED, Completion
from app.serving.instance_factory import _worker_configs, make_engine_pool
from tests.support.async_test import async_test
from tests.support.engine_pool import PoolHarness, expected_tokens, ready_message, take, tokens_of

LONG = 400
_STOPPED = EngineStopped("it crashed three times", 1)


def _loads(harness: PoolHarness) -> list[int]:
    return [client.load for client in harness.pool.engines]


def _is_empty(harness: PoolHarness) -> bool:
    pool = harness.pool
    clients = any(client._responses or client._slots._usage for client in pool.engines)
    return not (clients or pool.waiting or pool._suspended or pool.queue._entries)


@async_test
async def test_start_ends_when_all_engines_have_loaded_the_same_model() -> None:
    harness = PoolHarness(load=False)
    harness.engines[0].load()
    assert harness.pool.ready is None and harness.pool.phase == "loading weights"
    with pytest.raises(NotReady, match="loading weights"):
        harness.submit((1,))
    harness.engines[1].load()
    assert harness.pool.ready and harness.pool.ready.device == "2 x a CPU" and harness.pool.phase == "ready"
    for engine in harness.engines:
        engine.crash()
    facts = await asyncio.wait_for(harness.pool.wait_ready(), 60)
    assert facts.vocab_size == 1000, "a tokenizer that loads later is compared with it"


@pytest.mark.parametrize("other", ["model_version", "numerics", "failed start"])
@async_test
async def test_engines_that_differ_or_fail_at_startup_do_not_serve(other: str) -> None:
    harness = PoolHarness(load=False)
    harness.engines[0].load()
    if other == "failed start":
        harness.engines[1].give_up(EngineStopped("failed start: there is one GPU", 1))
    else:
        harness.engines[1].load(**{other: Version("another") if other == "model_version" else "another"})
    assert harness.pool.ready is None
    stopped = await asyncio.wait_for(harness.pool.wait_stopped(), 60)
    assert stopped.exit_code == 1 and other in str(stopped)


@async_test
async def test_single_engine_may_restart_with_other_numerics() -> None:
    harness = PoolHarness(1)
    assert harness.pool.ready is harness.engines[0].ready
    stream = harness.submit((1, 2, 3))
    harness.engines[0].crash()
    assert harness.pool.ready is None and stream.is_open
    harness.engines[0].load(numerics="another")
    assert harness.pool.ready and harness.pool.ready.numerics == "another"
    assert harness.texts() == [expected_tokens(stream)]


@pytest.mark.parametrize(("slots", "capacity"), [(1, 2), (4, 5), (8, 10), (32, 40), (256, 264)])
@async_test
async def test_without_keys_an_engine_queues_a_quarter_of_its_slots_and_at_most_eight(
    slots: int, capacity: int
) -> None:
    harness = PoolHarness(1, slots=slots)
    for number in range(2 * slots + 10):
        harness.submit((number,), max_tokens=LONG)
    assert _loads(harness) == [capacity]
    harness.step(2)
    assert _loads(harness) == [capacity] and len(harness.engines[0].running) == slots


@async_test
async def test_last_eighth_of_the_slots_is_reserved_for_tenants_without_one() -> None:
    harness = PoolHarness(1, slots=8)
    for number in range(20):
        harness.submit((number,), max_tokens=LONG, cache_namespace="ann")
    assert _loads(harness) == [7]
    streams = [harness.submit((number,), max_tokens=LONG, cache_namespace="bob") for number in range(2)]
    assert _loads(harness) == [8]
    harness.step()
    assert [stream.queue_position for stream in streams] == [None, 1]


@async_test
async def test_tenant_queues_at_most_one_step_of_prompt_tokens_on_an_engine() -> None:
    """An engine starts requests in the order of arrival: the more it has of one tenant, the longer another waits."""
    harness = PoolHarness(1, slots=32)
    for number in range(20):
        harness.submit((number,) * 100, cache_namespace="ann")
    assert _loads(harness) == [3], "256 prompt tokens and the rest of the last prompt"
    harness.submit((1,) * 100, cache_namespace="bob")
    assert _loads(harness) == [4]
    harness.pool.engines[0].on_report(StepReport(started=(RequestStarted("r0/0", 0),)))
    assert _loads(harness) == [5]
    harness.submit((2,) * 100, n=8, cache_namespace="cyd")
    assert _loads(harness) == [6 + 7], "followers read no prompt"


@async_test
async def test_grammar_compilation_takes_no_capacity_from_other_requests() -> None:
    harness = PoolHarness(1, slots=4)
    (client,) = harness.pool.engines
    guided = [harness.submit((1,), grammar="start: /a/") for _ in range(10)]
    assert client.load == 5 and not client.expects_progress
    for _ in range(10):
        harness.submit((1,))
    assert client.load == 10 and client.expects_progress
    client.on_report(StepReport(started=(RequestStarted("r0/0", 0),)))
    assert client.load == 11, "a compiled request runs, so the next grammar is compiled"
    assert [stream.queue_position for stream in guided][:6] == [None, 0, 1, 2, 3, 9]


@async_test
async def test_only_requests_of_an_engine_are_cancelled_there() -> None:
    harness = PoolHarness(1, slots=1)
    streams = [harness.submit((number,), n=2) for number in range(3)]
    harness.step()
    streams[1].end()
    assert not harness.engines[0].frames
    assert [stream.queue_position for stream in streams] == [None, None, 1]
    streams[0].end()
    assert len(harness.engines[0].frames) == 2
    harness.step(2)
    assert [stream.queue_position for stream in streams] == [None] * 3


@async_test
async def test_engines_share_one_queue_and_requests_start_in_order() -> None:
    harness = PoolHarness(slots=1, capacity=9)
    for number in range(2):
        harness.submit((number,), max_tokens=3)
    waiting = [harness.submit((number,) * 8, max_tokens=3) for number in range(1, 8)]
    with pytest.raises(QueueFull):
        harness.submit((9,) * 8)
    remaining = [stream.requests[0].id for stream in waiting]
    for _ in range(30):
        harness.step()
        positions = {s.requests[0].id: s.queue_position for s in waiting if s.queue_position is not None}
        assert sorted(positions.values()) == list(range(len(positions)))
        assert set(remaining[len(remaining) - len(positions) :]) == positions.keys()
    assert not any(stream.is_open for stream in waiting)


@async_test
async def test_all_sequences_of_a_request_run_on_one_engine_while_others_pass() -> None:
    harness = PoolHarness(slots=1)
    harness.submit((0,), max_tokens=LONG)
    forks = harness.submit((1,) * 8, n=4, max_tokens=6)
    other = harness.submit((2,), max_tokens=3)
    harness.step(3)
    assert [stream.engine for stream in (forks, other)] == [1, 0]
    assert forks.queue_position is None and other.queue_position == 1
    harness.completions[0].end()
    assert harness.texts([forks, other]) == [expected_tokens(forks), expected_tokens(other)]
    assert {request.id for request in forks.requests} <= set(harness.engines[1].seen)


@async_test
async def test_requests_with_a_cached_prefix_return_to_its_engine() -> None:
    harness = PoolHarness(3)
    first = [harness.submit((number,) * 16) for number in range(3)]
    assert sorted(stream.engine for stream in first) == [0, 1, 2]
    harness.texts()
    for turn in range(1, 4):
        again = [harness.submit((*(number,) * 16, *range(turn * 8)), n=2) for number in (2, 0, 1)]
        assert [stream.engine for stream in again] == [first[number].engine for number in (2, 0, 1)]
        harness.texts(again)


@async_test
async def test_waiting_requests_of_a_crashed_engine_move_and_keep_their_positions() -> None:
    harness = PoolHarness(slots=2)
    for number in range(8):
        harness.submit((number,) * 8)
    harness.step(3)
    assert [stream.engine for stream in harness.completions] == [0, 1, 0, 1, 0, 1, None, None]
    positions = [stream.queue_position for stream in harness.completions]
    assert positions == [None] * 4 + [0, 1, 2, 3]
    harness.engines[0].crash()
    assert [stream.queue_position for stream in harness.completions] == positions
    assert harness.pool.ready and harness.pool.restarts == 1
    harness.step(40)
    delayed = [harness.completions[index] for index in (0, 2, 4)]
    assert [s for s in harness.completions if s.is_open] == delayed, "one stream waits for the crashed engine"
    harness.engines[0].load()
    assert harness.texts() == [expected_tokens(stream) for stream in harness.completions]
    in_flight = {request.id for stream in delayed for request in stream.requests}
    assert not in_flight.intersection(harness.engines[1].seen), "requests in flight must not move to another engine"


@async_test
async def test_new_requests_do_not_run_with_suspects() -> None:
    harness = PoolHarness(3)
    for number in range(6):
        harness.submit((number,) * 8, max_tokens=50)
    harness.step(2)
    crashed = harness.completions[0].engine or 0
    harness.engines[crashed].crash()
    harness.engines[crashed].load()
    assert harness.pool.engines[crashed].n_suspects == 2
    assert harness.submit((0,) * 8).engine != crashed
    harness.step(8)
    assert harness.pool.engines[crashed].n_suspects == 0


@async_test
async def test_requests_of_an_abandoned_engine_move_to_the_others() -> None:
    harness = PoolHarness(slots=2)
    for number in range(8):
        harness.submit((number,) * 8)
    harness.step(3)
    harness.engines[0].crash()
    harness.engines[0].give_up(_STOPPED)
    assert harness.pool.ready and not harness.pool._stopped_event.is_set()
    assert harness.texts() == [expected_tokens(stream) for stream in harness.completions]
    moved = [name for name in harness.engines[1].seen if name in {"r0/0", "r2/0", "r4/0"}]
    assert moved == ["r0/0", "r2/0", "r4/0"], "they return to the head of the queue in order"
    assert sum(client.replayed for client in harness.pool.engines) == 3
    stream = harness.submit((1,) * 8)
    assert stream.engine == 1
    harness.engines[1].give_up(EngineStopped("so did this one", 1))
    assert harness.text(stream) == "EngineFailed"
    assert str(await asyncio.wait_for(harness.pool.wait_stopped(), 60)) == "so did this one"
    for again in (lambda: harness.submit((1,)), lambda: harness.pool.resubmit(stream)):
        with pytest.raises(NotReady):
            again()


@async_test
async def test_suspect_that_disconnects_and_resumes_stays_a_suspect() -> None:
    harness = PoolHarness(1)
    stream = harness.submit((1,) * 8)
    for _ in range(2):
        stream.detach()
        stream.attach()
        harness.step()
        harness.engines[0].crash()
        harness.engines[0].load()
    assert harness.text(stream) == "EngineFailed"


@async_test
async def test_engine_that_restarts_with_other_weights_is_given_up() -> None:
    harness = PoolHarness()
    streams = [harness.submit((number,) * 8) for number in range(4)]
    harness.step(2)
    harness.engines[0].crash()
    harness.engines[0].load(numerics="another")
    assert harness.engines[0].is_stopped and harness.pool.ready
    assert harness.texts() == [expected_tokens(stream) for stream in streams]
    assert not any(isinstance(frame, Submit) for frame in harness.engines[0].frames)


@async_test
async def test_stopping_the_pool_ends_every_stream_once_and_sends_nothing() -> None:
    harness = PoolHarness()
    for number in range(6):
        harness.submit((number,) * 8)
    harness.step()
    await harness.pool.stop()
    assert harness.texts() == ["NotReady"] * 6
    assert not any(isinstance(frame, Submit) for engine in harness.engines for frame in engine.frames)
    assert (await asyncio.wait_for(harness.pool.wait_stopped(), 60)).exit_code == 0


@async_test
async def test_requests_of_an_engine_being_killed_do_not_move() -> None:
    """The killed engine may still send events until it exits, and the crash has no suspect yet."""
    harness = PoolHarness(slots=1)
    streams = [harness.submit((number,) * 8) for number in range(6)]
    harness.step(3)
    harness.engines[0].crash()
    homes = [stream.engine for stream in streams]
    harness.engines[1].ready = None  # as the supervisor does when it kills
    harness.engines[0].load()
    assert [stream.engine for stream in streams] == homes
    harness.engines[1].crash()
    harness.engines[1].load()
    assert harness.texts() == [expected_tokens(stream) for stream in streams]


@async_test
async def test_paused_stream_resumes_on_its_engine_or_an_available_one() -> None:
    harness = PoolHarness()
    stream = harness.submit((1,) * 8, max_tokens=30)
    home = stream.engine or 0
    harness.step(5)
    stream.detach()
    stream.attach()
    assert stream.engine == home
    harness.step(5)
    stream.detach()
    harness.step()
    harness.engines[home].crash()
    stream.attach()
    assert stream.engine == 1 - home
    assert harness.texts() == [expected_tokens(stream)]


@async_test
async def test_suspended_stream_survives_its_engine() -> None:
    harness = PoolHarness()
    stream = harness.submit((1,) * 8, max_tokens=MAX_BUFFERED + 50)
    harness.step(MAX_BUFFERED + 10)
    assert stream.n_suspensions == 1
    home = stream.engine or 0
    harness.engines[home].crash()
    harness.engines[home].give_up(_STOPPED)
    first = take(stream)
    assert harness.pool.engines[1 - home].load == 1
    assert tokens_of([*first, *harness.read(stream)]) == expected_tokens(stream)


@pytest.mark.parametrize("seed", range(12))
@async_test
async def test_every_stream_gives_its_output_alone_whatever_happens(seed: int) -> None:
    """Crashes, reconnects, pauses and new requests in any order; prompts with common prefixes; several choices."""
    draw = random.Random(seed)
    harness = PoolHarness(draw.randint(2, 4), slots=draw.randint(1, 6))
    paused: list[Completion] = []
    for _ in range(120):
        what, engine = draw.random(), draw.choice(harness.engines)
        if what < 0.3:
            prompt = tuple(draw.randrange(2) for _ in range(draw.randint(1, 30)))
            if harness.pool.ready:
                harness.submit(prompt, n=draw.randint(1, 3), max_tokens=draw.randint(1, 20))
        elif what < 0.36 and engine.ready:
            # No request becomes a suspect twice by chance: the one on trial has produced two tokens.
            harness.step(8 if engine.client.n_suspects else 0)
            if not engine.client.n_suspects:
                engine.crash()
        elif what < 0.5 and engine.ready is None:
            engine.load()
        elif what < 0.6 and harness.completions:
            stream = draw.choice(harness.completions)
            if stream in paused:
                paused.remove(stream)
                stream.attach()
            elif stream.is_open:
                paused.append(stream)
                stream.detach()
        else:
            harness.step()
    for stream in paused:
        stream.attach()
    for engine in harness.engines:
        if engine.ready is None:
            engine.load()
    assert harness.texts() == [expected_tokens(stream) for stream in harness.completions]
    assert _is_empty(harness)
    assert len({stream.engine for stream in harness.completions}) > 1


@async_test
async def test_after_blaming_a_request_the_engine_runs_a_canary_first() -> None:
    """The canary request runs alone in it; other suspects and new requests wait for it to finish."""
    harness = PoolHarness(1)
    streams = [harness.submit((number,) * 8) for number in range(3)]
    engine, client = harness.engines[0], harness.pool.engines[0]
    engine.deadly = streams[0].open_ids[0]
    for _ in range(2):
        harness.step()
        if engine.ready is None:
            engine.load()
    assert engine.restarts == 2 and not streams[0].is_open and CANARY_ID in client._responses
    replayed = client.replayed
    engine.seen.clear()
    harness.step()
    assert engine.seen == [CANARY_ID] and client.n_suspects == 3 and harness.pool.queue.position(CANARY_ID) is None
    engine.crash()
    assert client.n_suspects == 2 and CANARY_ID not in client._responses, "a crash during the canary blames no request"
    assert CANARY_ID not in client._responses
    engine.load()
    late_stream = harness.submit((9,) * 8)
    harness.step(2)
    assert CANARY_ID not in client._responses and engine.seen[-1] == CANARY_ID
    assert harness.texts()[1:] == [expected_tokens(stream) for stream in (*streams[1:], late_stream)]
    engine.crash()
    engine.load()
    assert CANARY_ID not in client._responses, "no request was blamed for this crash"
    assert client.replayed == replayed + 2


@async_test
async def test_canary_of_the_service_that_is_refused_leaves_nothing_behind() -> None:
    """It may be in flight in two crashes, as any request, and nothing but the pool removes it."""
    harness = PoolHarness(1)
    engine, client = harness.engines[0], harness.pool.engines[0]
    canary = Canary(ready_message(), "service canary")
    harness.pool.submit(canary)
    engine.deadly = "service canary"
    for _ in range(2):
        engine.step()
        assert engine.ready is None
        engine.load()
    assert isinstance(canary.failure, EngineFailed)
    with pytest.raises(EngineFailed):
        await canary.wait_answered()
    stream = harness.submit((1,) * 8)
    assert harness.texts() == [expected_tokens(stream)]
    assert not client.n_suspects and _is_empty(harness)


@async_test
async def test_canary_of_the_service_ends_with_the_pool() -> None:
    harness = PoolHarness(1)
    canary = Canary(ready_message(), "service canary")
    harness.pool.submit(canary)
    harness.pool.fail_all(NotReady("draining", 5))
    assert isinstance(canary.failure, NotReady) and _is_empty(harness)


@async_test
async def test_summed_metrics_do_not_decrease_when_an_engine_crashes() -> None:
    """Prometheus would take a decrease for a reset. Of the start times, the slowest is exported."""
    harness = PoolHarness()

    def samples(name: str) -> list[Any]:
        (family,) = [f for f in EngineState(lambda: [harness.pool]).collect() if f.name == f"inkstream_{name}"]
        return family.samples

    def values() -> list[float]:
        return [samples(name)[0].value for name in ("preemptions", "block_violations")]

    for client, so_far in zip(harness.pool.engines, (3, 7), strict=True):
        client.on_report(StepReport(counters=Counters(preemptions=so_far, block_violations=so_far + 1)))
    assert values() == [10, 12]
    for engine in harness.engines:
        engine.crash()
        assert values() == [10, 12]
        engine.load()
    harness.pool.engines[1].on_report(StepReport(counters=Counters(preemptions=1)))
    assert values() == [11, 12]
    harness.engines[0].start_seconds = {"starting": 1.0, "loading weights": 5.0}
    harness.engines[1].start_seconds = {"starting": 2.0, "loading weights": 3.0}
    phases = {sample.labels["phase"]: sample.value for sample in samples("engine_start_seconds")}
    assert phases == {"starting": 2.0, "loading_weights": 5.0}


BLOCK = 4
WEIGHTS = Version("w")


def _prompt(draw: random.Random) -> tuple[int, ...]:
    """A prompt that often shares a prefix with others."""
    return tuple(draw.randrange(2) for _ in range(draw.randrange(1, 40)))


def _request(prompt: tuple[int, ...], namespace: str = "", **more: Any) -> Request:
    return Request(id="r", prompt=prompt, max_tokens=1, cache_namespace=namespace, **more)


def _hashes(prompt: tuple[int, ...], namespace: str = "") -> list[int]:
    return block_hashes([_request(prompt, namespace)], BLOCK, WEIGHTS)


@given(st.integers(0, 2**32))
def test_prompts_share_one_hash_per_common_full_block(seed: int) -> None:
    draw = random.Random(seed)
    one = _prompt(draw)
    other = (*one[: draw.randrange(len(one) + 1)], *_prompt(draw))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    shared = set(_hashes(one)) & set(_hashes(other))
    assert len(shared) == same // BLOCK
    assert set(_hashes(one)[: same // BLOCK]) == shared
    assert not set(_hashes(one, "ann")) & set(_hashes(one, "bob")), "tenants share no hashes"


def test_hashes_of_a_batch_are_unique_and_bounded() -> None:
    one, other = _request((1,) * 8 + (2,) * 4), _request((1,) * 8 + (3,) * 4)
    fork = _request((1,) * 8 + (2,) * 4, leader="r")
    assert set(block_hashes([one, fork, other], BLOCK, WEIGHTS)) == {*_hashes(one.prompt), *_hashes(other.prompt)}
    assert len(block_hashes([one, fork, other], BLOCK, WEIGHTS)) == 4
    assert len(block_hashes([_request(tuple(range(100_000)))], 1, WEIGHTS)) == 4096
    source = _request((1,) * 8, source=(1, 2))
    assert not set(block_hashes([source], BLOCK, WEIGHTS)) & set(_hashes((1,) * 8))


def test_router_hashes_differ_between_adapters() -> None:
    versions = [WEIGHTS, Version("w", ("a",)), Version("w", ("b",)), Version("w", ("a", "b")), Version("w", ("b", "a"))]
    hashes = [block_hashes([_request((1,) * 2 * BLOCK)], BLOCK, version) for version in versions]
    assert len({block for one in hashes for block in one}) == 2 * len(versions)
    unnamed = block_hashes([_request((1,) * 2 * BLOCK)], BLOCK, Version("other weights"))
    assert unnamed == hashes[0], "all engines have the same weights"
    first = hash((hash(("", ())), (1,) * BLOCK))
    assert hashes[0][0] == first, "hashes without adapters are as they were before versions had adapters"


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_router_respects_the_load_bound_and_prefers_the_longest_prefix(seed: int, n: int) -> None:
    draw, router, used = random.Random(seed), PrefixRouter(n), [-1] * n
    for time in range(draw.randrange(12)):
        router.record(engine := draw.randrange(n), _hashes(_prompt(draw)), 1000)
        used[engine] = time
    if draw.random() < 0.5:
        router.clear(lost := draw.randrange(n))
        assert not router.n_cached(lost, _hashes((0,) * 40)), "a crashed engine has lost its cache"
    loads = {engine: draw.randrange(draw.choice((2, 40))) for engine in draw.sample(range(n), draw.randint(1, n))}
    adding, hashes = draw.randint(1, 16), _hashes(_prompt(draw))
    chosen = router.choose(hashes, loads, adding)
    bound = math.ceil(1.25 * (sum(loads.values()) + adding) / len(loads))
    allowed = [one for one, load in loads.items() if load == min(loads.values()) or load + adding <= bound]
    best = max(allowed, key=lambda one: (router.n_cached(one, hashes), -loads[one], -used[one]))
    assert (used[chosen], chosen in allowed) == (used[best], True)


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_router_remembers_a_bounded_number_of_complete_prefixes(seed: int, most: int) -> None:
    """A block without the one before it would count against the bound, but be of no use."""
    draw, router = random.Random(seed), PrefixRouter(1)
    chains = [_hashes(_prompt(draw)) for _ in range(12)]
    for hashes in chains:
        router.record(0, hashes, most)
        assert len(router._blocks_of[0]) <= most
        for names in chains:
            flags = [router.n_cached(0, [name]) for name in names]
            assert flags == sorted(flags, reverse=True)
        assert router.n_cached(0, hashes) == min(most, len(hashes))


def test_every_engine_gets_the_same_number_of_threads() -> None:
    settings, share = Settings(replicas=2, kernels="torch"), EngineShare(2, (4, 5))
    configs = _worker_configs(settings, [share, share])
    assert [(config.replica, config.threads, config.concurrent_loaders) for config in configs] == [(0, 2, 1), (1, 2, 1)]
    (single,) = _worker_configs(settings, [share])
    assert single == replace(configs[0], replicas=1, concurrent_loaders=0)
    assert single.cpus == (4, 5)


@pytest.mark.parametrize(
    ("replicas", "threads", "words"),
    [(2, 0, ""), (3, 0, "--replicas 3 exceeds the 2 threads"), (1, 3, "--threads 3 exceeds the 2 available cores")],
)
@async_test
async def test_engines_with_too_many_threads_for_the_cores_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, replicas: int, threads: int, words: str
) -> None:
    two_cores = Topology((Core((0,)), Core((1,))))
    monkeypatch.setattr("app.serving.instance_factory.read_topology", lambda: two_cores)
    make_engine_pool(Settings(replicas=replicas, threads=threads, kernels="torch"))
    assert words in caplog.text and bool(caplog.text) == bool(words)
