"""What an engine is sent: as much as it may run, a few requests more, and nothing that would cost another its turn."""

from __future__ import annotations

import pytest

from app.common.types import Request, RequestStarted, StepReport
from tests.support.engine_pool import PoolHarness, alone, in_loop

LONG = 400


def _request(name: str, namespace: str = "", prompt: int = 1, grammar: str = "") -> Request:
    return Request(id=name, prompt=(1,) * prompt, max_tokens=9, cache_namespace=namespace, grammar=grammar)


def _loads(harness: PoolHarness) -> list[int]:
    return [client.load for client in harness.pool.engines]


@pytest.mark.parametrize(("slots", "capacity"), [(1, 2), (4, 5), (8, 10), (32, 40), (256, 264)])
def test_without_keys_an_engine_has_a_quarter_more_than_it_runs_and_at_most_eight(slots: int, capacity: int) -> None:
    async def scenario() -> None:
        harness = PoolHarness(1, slots=slots)
        for who in range(2 * slots + 10):
            harness.submit((who,), max_tokens=LONG)
        assert _loads(harness) == [capacity]
        harness.step(2)
        assert _loads(harness) == [capacity] and len(harness.engines[0].running) == slots

    in_loop(scenario)


def test_the_last_eighth_of_the_slots_is_for_tenants_that_have_none() -> None:
    async def scenario() -> None:
        harness = PoolHarness(1, slots=8)
        for who in range(20):
            harness.submit((who,), max_tokens=LONG, cache_namespace="ann")
        assert _loads(harness) == [7]
        streams = [harness.submit((who,), max_tokens=LONG, cache_namespace="bob") for who in range(2)]
        assert _loads(harness) == [8]
        harness.step()
        assert [stream.queue_position for stream in streams] == [None, 1]

    in_loop(scenario)


def test_a_tenant_is_no_further_ahead_than_a_step() -> None:
    """An engine starts requests in the order of arrival: the more it has of one tenant, the longer another waits."""

    async def scenario() -> None:
        harness = PoolHarness(1, slots=32)
        for who in range(20):
            harness.submit((who,) * 100, cache_namespace="ann")
        assert _loads(harness) == [3], "256 prompt tokens, and the rest of the last prompt"
        harness.submit((1,) * 100, cache_namespace="bob")
        assert _loads(harness) == [4]
        harness.pool.engines[0].on_report(StepReport(started=(RequestStarted("r0/0", 0),)))
        assert _loads(harness) == [5]
        harness.submit((2,) * 100, n=8, cache_namespace="cyd")
        assert _loads(harness) == [6 + 7], "followers read no prompt"

    in_loop(scenario)


def test_grammars_that_are_compiled_take_no_capacity_from_others() -> None:
    async def scenario() -> None:
        harness = PoolHarness(1, slots=4)
        pool, (client,) = harness.pool, harness.pool.engines
        guided = [pool.submit([_request(f"g{i}", grammar="start: /a/")]) for i in range(10)]
        assert client.load == 5 and not client.expects_progress
        for i in range(10):
            pool.submit([_request(f"r{i}")])
        assert client.load == 10 and client.expects_progress
        client.on_report(StepReport(started=(RequestStarted("g0", 0),)))
        assert client.load == 11, "a compiled one runs: the next grammar is compiled"
        assert [stream.queue_position for stream in guided][:6] == [None, 0, 1, 2, 3, 9]

    in_loop(scenario)


def test_a_request_that_was_not_sent_is_cancelled_without_the_engine() -> None:
    async def scenario() -> None:
        harness = PoolHarness(1, slots=1)
        streams = [harness.submit((who,), n=2) for who in range(3)]
        harness.step()
        streams[1].close()
        assert not harness.engines[0].frames
        assert [stream.queue_position for stream in streams] == [None, None, 1]
        streams[0].close()
        assert len(harness.engines[0].frames) == 2
        harness.step(2)
        assert [stream.queue_position for stream in streams] == [None] * 3

    in_loop(scenario)


def test_the_next_request_goes_to_the_engine_that_has_capacity_first() -> None:
    async def scenario() -> None:
        harness = PoolHarness(slots=2)
        streams = [harness.submit((who,) * 8, max_tokens=2 if who % 2 else LONG) for who in range(10)]
        assert _loads(harness) == [3, 3]
        harness.step(12)
        assert [stream.engine for stream in streams[:6]] == [0, 1] * 3
        assert [stream.engine for stream in streams[6:9]] == [1] * 3
        assert await harness.texts() == [alone(stream) for stream in streams]
        assert sum(client.replayed for client in harness.pool.engines) == 0, "no engine has crashed"

    in_loop(scenario)


def test_requests_start_in_the_order_of_the_queue_on_all_engines_together() -> None:
    async def scenario() -> None:
        harness = PoolHarness(slots=1)
        for who in range(2):
            harness.submit((who,), max_tokens=3)
        waiting = [harness.submit((who,) * 8, max_tokens=3) for who in range(1, 8)]
        remaining = [stream.requests[0].id for stream in waiting]
        for _ in range(30):
            harness.step()
            positions = {s.requests[0].id: s.queue_position for s in waiting if s.queue_position is not None}
            assert sorted(positions.values()) == list(range(len(positions)))
            assert set(remaining[len(remaining) - len(positions) :]) == positions.keys()
        assert not any(stream.is_open for stream in waiting)

    in_loop(scenario)


def test_all_sequences_of_a_response_run_on_one_engine_while_others_pass() -> None:
    async def scenario() -> None:
        harness = PoolHarness(slots=1)
        harness.submit((0,), max_tokens=LONG)
        forks = harness.submit((1,) * 8, n=4, max_tokens=6)
        other = harness.submit((2,), max_tokens=3)
        harness.step(3)
        assert [stream.engine for stream in (forks, other)] == [1, 0]
        assert forks.queue_position is None and other.queue_position == 1
        harness.streams[0].close()
        assert await harness.texts([forks, other]) == [alone(forks), alone(other)]
        assert {request.id for request in forks.requests} <= set(harness.engines[1].seen)

    in_loop(scenario)
