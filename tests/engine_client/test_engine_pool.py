"""Engine pool: routing of requests, and recovery when an engine crashes or is abandoned.

The clients are real; the engines are played by the test, and draw by a hash of all tokens before, as a model does.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from app.api.metrics import EngineState
from app.common.errors import NotReady, QueueFull
from app.common.ipc import Submit, WorkerConfig
from app.common.settings import Settings
from app.common.types import Counters, SampledEvent, StepReport
from app.engine.memory.memory_plan import CacheShape
from app.engine_client.client import EngineClient
from app.engine_client.crash_recovery import CANARY_ID
from app.engine_client.engine_pool import EnginePool
from app.engine_client.fair_queue import FairQueue, QueueLimits
from app.engine_client.supervisor import EngineStopped
from app.engine_client.token_stream import MAX_BUFFERED, TokenStream
from app.main import _worker_configs, make_engine_pool
from app.serving.model_instance import ModelInstance
from app.serving.weights_snapshot import take_fingerprint
from model.config import ModelConfig
from model.tokenizer.tokenizer import TokenizerError
from tests.support.engine_pool import PoolHarness, alone, in_loop, read_text, ready_message

_GROWING = ("inkstream_preemptions", "inkstream_block_violations")


def test_a_start_is_over_when_all_engines_have_loaded_the_same() -> None:
    async def scenario() -> None:
        harness = PoolHarness(load=False)
        harness.engines[0].load()
        assert harness.pool.ready is None and harness.pool.phase == "loading weights"
        with pytest.raises(NotReady, match="loading weights"):
            harness.submit((1,))
        harness.engines[1].load()
        await asyncio.wait_for(harness.pool.wait_ready(), 60)
        assert harness.pool.ready and harness.pool.ready.device == "2 x a CPU" and harness.pool.phase == "ready"

    in_loop(scenario)


@pytest.mark.parametrize("other", ["weights_version", "numerics"])
def test_engines_that_differ_from_the_start_do_not_serve(other: str) -> None:
    async def scenario() -> None:
        harness = PoolHarness(load=False)
        harness.engines[0].load()
        harness.engines[1].load(**{other: "another"})
        assert harness.pool.ready is None
        stopped = await asyncio.wait_for(harness.pool.wait_stopped(), 60)
        assert stopped.exit_code == 1 and other in str(stopped)

    in_loop(scenario)


def test_an_engine_that_cannot_start_ends_the_start() -> None:
    async def scenario() -> None:
        harness = PoolHarness(3, load=False)
        harness.engines[0].load()
        harness.engines[2].give_up(EngineStopped("--replicas 3: each takes a GPU, and there are 2", 2))
        stopped = await asyncio.wait_for(harness.pool.wait_stopped(), 60)
        assert stopped.exit_code == 2 and "there are 2" in str(stopped)

    in_loop(scenario)


def test_one_engine_is_as_without_a_fleet() -> None:
    async def scenario() -> None:
        harness = PoolHarness(1)
        assert harness.pool.ready is harness.engines[0].ready
        stream = harness.submit((1, 2, 3))
        harness.engines[0].crash()
        assert harness.pool.ready is None and stream.is_open
        harness.engines[0].load(numerics="another")
        assert harness.pool.ready and harness.pool.ready.numerics == "another"
        assert await harness.texts() == [alone(stream)]
        harness.engines[0].give_up(EngineStopped("three times", 1))
        assert (await asyncio.wait_for(harness.pool.wait_stopped(), 60)).exit_code == 1

    in_loop(scenario)


def test_a_beginning_comes_back_to_its_engine_and_all_choices_run_on_one() -> None:
    async def scenario() -> None:
        harness = PoolHarness(3)
        first = [harness.submit((who,) * 16) for who in range(3)]
        assert sorted(stream.engine for stream in first) == [0, 1, 2]
        await harness.texts()
        for turn in range(1, 4):
            for who in range(3):
                again = harness.submit((*(who,) * 16, *range(turn * 8)), n=2)
                assert again.engine == first[who].engine
                assert {f"{again.requests[0].id}", f"{again.requests[1].id}"} <= set(
                    harness.pool.engines[first[who].engine]._streams
                )
            await harness.texts(harness.streams[-3:])

    in_loop(scenario)


def test_the_limits_of_the_queue_are_those_of_all_engines_together() -> None:
    async def scenario() -> None:
        harness = PoolHarness(slots=1, capacity=6)
        for who in range(2):
            harness.submit((who,) * 8)
        harness.step()
        for who in range(2, 8):
            harness.submit((who,) * 8)
        with pytest.raises(QueueFull):
            harness.submit((9,) * 8)
        assert [stream.queue_position for stream in harness.streams] == [None, None, *range(6)]
        assert sorted(client.load for client in harness.pool.engines) == [2, 2], "each runs one and has the next one"

    in_loop(scenario)


def test_after_a_crash_what_waits_goes_on_elsewhere_and_keeps_its_place() -> None:
    async def scenario() -> None:
        harness = PoolHarness(slots=2)
        for who in range(8):
            harness.submit((who,) * 8)
        harness.step(3)
        assert [stream.engine for stream in harness.streams] == [0, 1, 0, 1, 0, 1, None, None]
        positions = [stream.queue_position for stream in harness.streams]
        assert positions == [None] * 4 + [0, 1, 2, 3]
        harness.engines[0].crash()
        assert [stream.queue_position for stream in harness.streams] == positions
        assert harness.pool.ready and harness.pool.restarts == 1
        harness.step(40)
        delayed = [harness.streams[index] for index in (0, 2, 4)]
        assert [s for s in harness.streams if s.is_open] == delayed, "a stream waits for the engine that crashed"
        harness.engines[0].load()
        assert await harness.texts() == [alone(stream) for stream in harness.streams]
        in_flight = {request.id for stream in delayed for request in stream.requests}
        assert not in_flight.intersection(harness.engines[1].seen), "what was in flight met no other engine"

    in_loop(scenario)


def test_a_request_that_kills_engines_kills_one_engine_twice_and_no_other() -> None:
    async def scenario() -> None:
        harness = PoolHarness(slots=4)
        for engine in harness.engines:
            engine.deadly = "r5/0"
        for who in range(12):
            harness.submit((who,) * 8)
        for _ in range(300):
            harness.step()
            for engine in harness.engines:
                if engine.ready is None:
                    engine.load()
        texts = await harness.texts()
        assert texts.pop(5) == "EngineFailed"
        assert texts == [alone(stream) for i, stream in enumerate(harness.streams) if i != 5]
        assert sorted(engine.restarts for engine in harness.engines) == [0, 2]

    in_loop(scenario)


def test_newcomers_do_not_meet_suspects() -> None:
    async def scenario() -> None:
        harness = PoolHarness(3)
        for who in range(6):
            harness.submit((who,) * 8, max_tokens=50)
        harness.step(2)
        shaken = harness.streams[0].engine
        harness.engines[shaken].crash()
        harness.engines[shaken].load()
        assert harness.pool.engines[shaken].n_suspects == 2
        assert harness.submit((0,) * 8).engine != shaken
        harness.step(8)
        assert harness.pool.engines[shaken].n_suspects == 0

    in_loop(scenario)


def test_an_engine_that_is_given_up_leaves_all_it_had_to_the_others() -> None:
    async def scenario() -> None:
        harness = PoolHarness(slots=2)
        for who in range(8):
            harness.submit((who,) * 8)
        harness.step(3)
        harness.engines[0].crash()
        harness.engines[0].give_up(EngineStopped("it crashed three times", 1))
        assert harness.pool.ready and not harness.pool._stopped_event.is_set()
        assert await harness.texts() == [alone(stream) for stream in harness.streams]
        moved = [name for name in harness.engines[1].seen if name in {"r0/0", "r2/0", "r4/0"}]
        assert moved == ["r0/0", "r2/0", "r4/0"], "they return to the head of the queue in their order"
        stream = harness.submit((1,) * 8)
        assert stream.engine == 1
        harness.engines[1].give_up(EngineStopped("so did this one", 1))
        assert await read_text(stream) == "EngineFailed"
        assert str(await asyncio.wait_for(harness.pool.wait_stopped(), 60)) == "so did this one"
        with pytest.raises(NotReady):
            harness.submit((1,))

    in_loop(scenario)


def test_an_engine_that_comes_back_with_other_weights_is_given_up() -> None:
    async def scenario() -> None:
        harness = PoolHarness()
        streams = [harness.submit((who,) * 8) for who in range(4)]
        harness.step(2)
        harness.engines[0].crash()
        harness.engines[0].load(numerics="another")
        assert harness.engines[0].is_stopped and harness.pool.ready
        assert await harness.texts() == [alone(stream) for stream in streams]
        assert not harness.engines[0].requests, "nothing was sent to it"

    in_loop(scenario)


def test_the_end_of_the_service_ends_every_stream_once_and_sends_nothing_about() -> None:
    async def scenario() -> None:
        harness = PoolHarness()
        for who in range(6):
            harness.submit((who,) * 8)
        harness.step()
        await harness.pool.stop()
        assert [await read_text(stream) for stream in harness.streams] == ["NotReady"] * 6
        assert not any(isinstance(frame, Submit) for engine in harness.engines for frame in engine.frames)
        assert (await asyncio.wait_for(harness.pool.wait_stopped(), 60)).exit_code == 0

    in_loop(scenario)


@pytest.mark.parametrize("n", [1, 2])
def test_a_tokenizer_that_does_not_fit_is_found_also_where_an_engine_has_crashed_since(weights: Path, n: int) -> None:
    """The tokenizer may take longer to load than the model."""

    async def scenario() -> None:
        harness = PoolHarness(n, load=False)
        instance = ModelInstance(weights, take_fingerprint(weights), harness.pool, None, grammar_seconds=1.0)
        for engine in harness.engines:
            engine.load(vocab_size=2)
        for engine in harness.engines:
            engine.crash()
        with pytest.raises(TokenizerError, match="the model only 2"):
            await asyncio.wait_for(instance.load(), 60)

    in_loop(scenario)


def test_what_only_waits_goes_to_the_engine_that_is_back_first() -> None:
    async def scenario() -> None:
        harness = PoolHarness(slots=1)
        for who in range(8):
            harness.submit((who,) * 8)
        harness.step(3)
        harness.engines[0].crash()
        harness.step()
        harness.engines[1].crash()
        harness.engines[0].load()
        harness.step(200)
        assert [s for s in harness.streams if s.is_open] == [harness.streams[1], harness.streams[3]], (
            "a suspect waits for its own"
        )
        harness.engines[1].load()
        assert await harness.texts() == [alone(stream) for stream in harness.streams]

    in_loop(scenario)


def test_what_an_engine_that_is_being_killed_may_have_does_not_go_elsewhere() -> None:
    """Until it has exited it may still send events, and the crash has no suspect yet."""

    async def scenario() -> None:
        harness = PoolHarness(slots=1)
        streams = [harness.submit((who,) * 8) for who in range(6)]
        harness.step(3)
        harness.engines[0].crash()
        homes = [stream.engine for stream in streams]
        harness.engines[1].ready = None  # as the supervisor does when it kills
        harness.engines[0].load()
        assert [stream.engine for stream in streams] == homes
        harness.engines[1].crash()
        harness.engines[1].load()
        assert await harness.texts() == [alone(stream) for stream in streams]

    in_loop(scenario)


def test_a_text_that_goes_to_an_engine_that_still_loads_is_counted_once() -> None:
    async def scenario() -> None:
        harness = PoolHarness()
        for who in range(2):
            harness.submit((who,) * 8)
        harness.step(3)
        harness.engines[1].crash()
        harness.engines[0].give_up(EngineStopped("three times", 1))
        harness.engines[1].load()
        assert sum(client.replayed for client in harness.pool.engines) == 2

    in_loop(scenario)


def test_a_counter_of_all_engines_does_not_fall_when_one_crashes() -> None:
    """Prometheus takes that for a reset, and counts the remaining value again."""

    async def scenario() -> None:
        harness = PoolHarness()

        def values() -> list[float]:
            families = list(EngineState(lambda: [harness.pool]).collect())
            return [f.samples[0].value for f in families if f.name in _GROWING]

        for client, so_far in zip(harness.pool.engines, (3, 7), strict=True):
            client.on_report(StepReport(counters=Counters(preemptions=so_far, block_violations=so_far + 1)))
        assert values() == [10, 12]
        for engine in harness.engines:
            engine.crash()
            assert values() == [10, 12]
            engine.load()
        harness.pool.engines[1].on_report(StepReport(counters=Counters(preemptions=1)))
        assert values() == [11, 12]

    in_loop(scenario)


def test_of_several_engines_the_slowest_start_is_told_for_each_phase() -> None:
    async def scenario() -> None:
        harness = PoolHarness()
        harness.engines[0].start_seconds = {"starting": 1.0, "loading weights": 5.0}
        harness.engines[1].start_seconds = {"starting": 2.0, "loading weights": 3.0, "proving": 1.0}
        (family,) = [
            f for f in EngineState(lambda: [harness.pool]).collect() if f.name == "inkstream_engine_start_seconds"
        ]
        series = {sample.labels["phase"]: sample.value for sample in family.samples}
        assert series == {"starting": 2.0, "loading_weights": 5.0, "proving": 1.0}

    in_loop(scenario)


def test_the_phase_is_that_of_an_engine_that_will_come() -> None:
    async def scenario() -> None:
        harness = PoolHarness()
        for engine, phase in zip(harness.engines, ("the weights are gone", "warming up"), strict=True):
            engine.phase = phase
            engine.crash()
        harness.engines[0].give_up(EngineStopped("the weights are gone", 2))
        assert harness.pool.phase == "warming up"
        harness.engines[1].give_up(EngineStopped("so they are", 2))
        assert harness.pool.phase == "the weights are gone"

    in_loop(scenario)


def test_an_engine_that_comes_back_does_not_share_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others have taken theirs: a share of the rest could be less than it had, and too little to start."""
    sent: list[WorkerConfig] = []

    class Process:
        pid = 1

        def __init__(self) -> None:
            self.exited = asyncio.Event()

        def send(self, frame: WorkerConfig) -> None:
            sent.append(frame)

        async def wait_closed(self) -> None:
            await self.exited.wait()

        async def terminate(self) -> int:
            return 1

    async def scenario() -> None:
        made: list[Process] = []

        async def spawn(*_: Any) -> Process:
            made.append(Process())
            return made[-1]

        monkeypatch.setattr("app.engine_client.supervisor.EngineProcess.spawn", spawn)
        configs = [WorkerConfig(weights="", replica=i, replicas=2, concurrent_loaders=1) for i in range(2)]
        pool = EnginePool(
            [EngineClient(config) for config in configs], FairQueue(QueueLimits(max_requests=1, max_prompt_tokens=1))
        )
        client = pool.engines[1]
        client.supervisor.start()
        for count in (1, 2, 3):
            for _ in range(1000):
                if len(sent) < count:
                    await asyncio.sleep(0)
            if count == 2:  # the first had not loaded when it ended
                client.supervisor._on_frame(ready_message())
            made[-1].exited.set()
        await client.supervisor.stop()

    in_loop(scenario)
    assert [config.concurrent_loaders for config in sent[:3]] == [1, 1, 0]
    assert {config.name for config in sent} == {"engine 1"}


def test_every_engine_gets_the_same_number_of_threads() -> None:
    settings = Settings(replicas=2, kernels="torch")
    configs = _worker_configs(settings, 5)
    assert [(config.replica, config.threads, config.concurrent_loaders) for config in configs] == [(0, 2, 1), (1, 2, 1)]
    assert _worker_configs(Settings(kernels="torch"), 5) == [
        replace(configs[0], threads=5, replicas=1, concurrent_loaders=0)
    ]
    assert {config.threads for config in _worker_configs(Settings(replicas=4, threads=2, kernels="torch"), 5)} == {1}


@pytest.mark.parametrize(
    ("replicas", "threads", "cores", "words"),
    [
        (2, 0, 2, ""),
        (3, 0, 2, "--replicas 3 exceeds the 2 threads"),
        (2, 1, 8, "--replicas 2 exceeds the 1 threads"),
        (1, 3, 2, "--threads 3 exceeds the 2 available cores"),
    ],
)
def test_engines_that_will_wait_for_one_another_are_told(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    replicas: int,
    threads: int,
    cores: int,
    words: str,
) -> None:
    monkeypatch.setattr("app.main.available_cores", lambda: cores)

    async def scenario() -> None:
        make_engine_pool(Settings(replicas=replicas, threads=threads, kernels="torch"))

    in_loop(scenario)
    assert words in caplog.text and bool(caplog.text) == bool(words)


def test_memory_that_engines_share_is_told_as_what_it_is() -> None:
    sizes: dict[str, Any] = {"vocab_size": 8, "width": 8, "n_layers": 1, "n_heads": 1, "n_kv_heads": 1, "head_dim": 8}
    shape = ModelConfig(**sizes, mlp_width=8, context=64)
    cache_shape = CacheShape(shape=shape, context=64, block_size=16, max_running=32, dtype=torch.float32)
    free = 2 * 100 * cache_shape.block_bytes
    assert (cache_shape.blocks(0, free), cache_shape.blocks(0, free, 2)) == (100, 50)
    with pytest.raises(ValueError, match=r"--kv-blocks 60 .* and each engine's part .* \(--replicas 2\) holds 50$"):
        cache_shape.blocks(60, free, 2)
    with pytest.raises(ValueError, match=r"and half of the free memory holds 100$"):
        cache_shape.blocks(160, free)
    with pytest.raises(ValueError, match=r"give a smaller --max-context or --replicas, or free some$"):
        cache_shape.blocks(0, free, 50)
    with pytest.raises(ValueError, match=r"half of the free memory holds: give a smaller --max-context, or free some$"):
        cache_shape.blocks(0, free // 50)


def test_a_paused_stream_goes_on_at_home_or_where_there_is_an_engine() -> None:
    async def scenario() -> None:
        harness = PoolHarness()
        stream = harness.submit((1,) * 8, max_tokens=30)
        home = stream.engine
        harness.step(5)
        stream.pause()
        harness.pool.resume(stream)
        assert stream.engine == home
        harness.step(5)
        stream.pause()
        harness.step()
        harness.engines[home].crash()
        harness.pool.resume(stream)
        assert stream.engine == 1 - home
        assert await harness.texts() == [alone(stream)]

    in_loop(scenario)


def test_a_stream_that_is_held_outlives_its_engine() -> None:
    async def scenario() -> None:
        harness = PoolHarness()
        stream = harness.submit((1,) * 8, max_tokens=MAX_BUFFERED + 50)
        harness.step(MAX_BUFFERED + 10)
        assert stream.n_suspensions == 1
        home = stream.engine or 0
        harness.engines[home].crash()
        harness.engines[home].give_up(EngineStopped("three times", 1))
        assert stream.is_open
        first = await stream.receive()
        assert harness.pool.engines[1 - home].load == 1
        harness.step(200)
        rest = await stream.receive()
        tokens = [a.item.token for a in (*first, *rest) if isinstance(a.item, SampledEvent)]
        assert tokens == alone(stream) and not stream.is_open

    in_loop(scenario)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_stream_says_what_it_says_alone(seed: int) -> None:
    """Crashes, returns, pauses and newcomers in any order; prompts that begin alike; several choices."""

    async def scenario() -> None:
        draw = random.Random(seed)
        harness = PoolHarness(draw.randint(2, 4), slots=draw.randint(1, 6))
        paused: list[TokenStream] = []
        for _ in range(120):
            what, engine = draw.random(), draw.choice(harness.engines)
            if what < 0.3:
                prompt = tuple(draw.randrange(2) for _ in range(draw.randint(1, 30)))
                if harness.pool.ready:
                    harness.submit(prompt, n=draw.randint(1, 3), max_tokens=draw.randint(1, 20))
            elif what < 0.36 and engine.ready:
                # So that no request is a suspect twice by bad luck: the one on trial has produced two tokens.
                harness.step(8 if engine.client.n_suspects else 0)
                if not engine.client.n_suspects:
                    engine.crash()
            elif what < 0.5 and engine.ready is None:
                engine.load()
            elif what < 0.6 and harness.streams:
                stream = draw.choice(harness.streams)
                if stream in paused:
                    paused.remove(stream)
                    harness.pool.resume(stream)
                elif stream.is_open:
                    paused.append(stream)
                    stream.pause()
            else:
                harness.step()
        for stream in paused:
            harness.pool.resume(stream)
        for engine in harness.engines:
            if engine.ready is None:
                engine.load()
        texts = await harness.texts()
        assert texts == [alone(stream) for stream in harness.streams]
        assert not any(client._streams or client._unstarted for client in harness.pool.engines)
        assert not (harness.pool._waiting or harness.pool._suspended or harness.pool.queue._entries)
        assert len({stream.engine for stream in harness.streams}) > 1

    in_loop(scenario)


def test_after_a_request_is_blamed_the_engine_shows_first_that_it_works() -> None:
    """The canary request runs alone in it; other suspects and new requests wait for it to finish."""

    async def scenario() -> None:
        harness = PoolHarness(1)
        streams = [harness.submit((who,) * 8) for who in range(3)]
        engine, client = harness.engines[0], harness.pool.engines[0]
        engine.deadly = streams[0].open_ids[0]
        for _ in range(2):
            harness.step()
            if engine.ready is None:
                engine.load()
        assert engine.restarts == 2 and not streams[0].is_open and client.is_running_canary
        replayed = client.replayed
        engine.seen.clear()
        harness.step()
        assert engine.seen == [CANARY_ID] and client.n_suspects == 3 and harness.pool.queue.position(CANARY_ID) is None
        engine.crash()
        assert client.n_suspects == 2 and not client.is_running_canary, (
            "a crash during the canary request blames no request"
        )
        assert CANARY_ID not in client._streams
        engine.load()
        newcomer = harness.submit((9,) * 8)
        harness.step(2)
        assert not client.is_running_canary and engine.seen[-1] == CANARY_ID
        assert (await harness.texts())[1:] == [alone(stream) for stream in (*streams[1:], newcomer)]
        engine.crash()
        engine.load()
        assert not client.is_running_canary, "no request was blamed for this crash"
        assert client.replayed == replayed + 2

    in_loop(scenario)
