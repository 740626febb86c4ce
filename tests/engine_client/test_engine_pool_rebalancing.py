"""Requests that wait for a busy engine move to one with free capacity: none is lost, run twice, or out of order."""

from __future__ import annotations

import asyncio

import pytest

from app.common.ipc import Cancel
from app.common.types import RequestStarted, SampledEvent, StepReport
from app.engine_client.supervisor import EngineStopped
from tests.support.engine_pool import PoolHarness, alone, in_loop

LONG = 400


def lopsided(slots: int, capacity: int = 1000) -> PoolHarness:
    """Two engines, and the second one away for a moment: all that comes now goes to the first one."""
    harness = PoolHarness(slots=slots, capacity=capacity)
    harness.engines[1].crash()
    return harness


def test_an_engine_that_has_places_takes_what_waits_for_another() -> None:
    async def scenario() -> None:
        harness = PoolHarness(slots=2)
        streams = [harness.submit((who,) * 8, max_tokens=2 if who % 2 else LONG) for who in range(8)]
        assert sorted(map(harness.home, streams)) == [0] * 4 + [1] * 4
        harness.step(12)
        assert not any(stream.queue_position is not None for stream in streams), "a request waits despite free slots"
        assert [len(engine.running) for engine in harness.engines] == [2, 2]
        assert not harness.engines[0].waiting and not harness.pool.queue._entries
        assert await harness.texts() == [alone(stream) for stream in streams]
        assert sum(client.replayed for client in harness.pool.engines) == 0, "no engine has crashed"

    in_loop(scenario)


def test_those_that_move_begin_in_the_order_of_the_queue_for_every_tenant() -> None:
    async def scenario() -> None:
        harness = lopsided(1)
        harness.submit((0,), max_tokens=LONG)
        harness.step()
        streams = [harness.submit((who,) * 8, cache_namespace="ab"[who == 5], max_tokens=3) for who in range(1, 6)]
        harness.step()
        names = {stream.queue_position: stream.requests[0].id for stream in streams}
        assert sorted(names) == [0, 1, 2, 3, 4] and names[1] == "r5/0", "one tenant waits with four, another with one"
        harness.engines[1].load()
        for number in range(5):
            harness.step()
            positions = [stream.queue_position for stream in streams if stream.queue_position is not None]
            assert sorted(positions) == list(range(len(positions))) and len(positions) >= 4 - number
        harness.step(30)
        assert [name.partition("~")[0] for name in harness.engines[1].seen] == [names[index] for index in range(5)]

    in_loop(scenario)


def test_who_moves_keeps_its_place_until_it_begins() -> None:
    async def scenario() -> None:
        harness = lopsided(2)
        streams = [harness.submit((who,) * 8, max_tokens=LONG) for who in range(6)]
        harness.step()
        before = [stream.queue_position for stream in streams]
        harness.engines[1].load()
        harness.engines[1].step()
        assert [harness.home(stream) for stream in streams] == [0, 0, 1, 1, 0, 0]
        assert [stream.queue_position for stream in streams] == before == [None, None, 0, 1, 2, 3]
        harness.engines[1].step()
        assert [stream.queue_position for stream in streams] == [None] * 4 + [0, 1]

    in_loop(scenario)


def test_what_the_other_engine_says_of_it_before_it_hears_of_the_move_is_not_its_text() -> None:
    async def scenario() -> None:
        harness = lopsided(1)
        streams = [harness.submit((who,) * 8) for who in range(2)]
        harness.step()
        (old,) = streams[1].open_ids
        harness.engines[1].load()
        harness.engines[1].step()
        assert harness.home(streams[1]) == 1 and Cancel(old) in harness.engines[0].frames
        late = SampledEvent(old, 0, 7)
        harness.pool.engines[0].on_report(StepReport(started=(RequestStarted(old, 0),), events=(late,)))
        assert streams[1].queue_position == 0
        assert await harness.texts() == [alone(stream) for stream in streams]

    in_loop(scenario)


@pytest.mark.parametrize("what", ["unread", "suspect", "too many", "last eighth"])
def test_what_must_not_move_does_not(what: str) -> None:
    """What the engine may be choking on, what it may have died of, and what would only wait elsewhere."""

    async def scenario() -> None:
        harness = lopsided(8)
        running = [harness.submit((who,), max_tokens=LONG) for who in range(8)]
        harness.step()
        filler = [
            harness.submit((9, who), max_tokens=LONG, cache_namespace="s")
            for who in range(1 if what == "unread" else 7)
        ]
        harness.step()
        if what == "suspect":
            harness.engines[0].crash()
            harness.engines[0].load()
        last = harness.submit((3,) * 4, n=8 if what == "too many" else 1, cache_namespace="s")
        if what in ("too many", "last eighth"):
            harness.step()
        harness.engines[1].load()
        harness.engines[1].step()
        moved = [stream for stream in filler if harness.home(stream) == 1]
        assert moved == ([] if what == "suspect" else filler)
        assert {harness.home(stream) for stream in (*running, last)} == {0}

    in_loop(scenario)


def test_a_beginning_is_remembered_where_it_moved_to() -> None:
    async def scenario() -> None:
        harness = lopsided(1)
        harness.submit((0,) * 8, max_tokens=LONG)
        moved = harness.submit((1,) * 32, max_tokens=3)
        harness.step()
        harness.engines[1].load()
        harness.step(6)
        assert not moved.is_open
        assert harness.home(harness.submit((1,) * 40)) == 1

    in_loop(scenario)


def test_what_moved_outlives_the_end_of_both_engines() -> None:
    async def scenario() -> None:
        harness = lopsided(1)
        streams = [harness.submit((who,) * 8, max_tokens=20) for who in range(4)]
        harness.step()
        harness.engines[1].load()
        harness.step(3)
        assert [harness.home(stream) for stream in streams] == [0, 1, 0, 0]
        harness.engines[1].crash()
        harness.engines[1].load()
        harness.step(8)
        harness.engines[0].crash()
        harness.engines[0].give_up(EngineStopped("three times", 1))
        assert await asyncio.wait_for(harness.texts(), 30) == [alone(stream) for stream in streams]

    in_loop(scenario)
