"""Resume store: time-outs, eviction, replayed frames; tests/api/test_resumed_streams.py covers the rest."""

from __future__ import annotations

import asyncio

from app.api.native.resumable_stream import ReplayBuffer
from app.api.resume_store import ResumeStore
from tests.support.async_test import async_test


class DisconnectedStream:
    """A stream whose client disconnected before or after its end."""

    def __init__(self, name: str, owner: str = "", *, is_finished: bool = False, alias: str = "") -> None:
        self.name, self.owner, self.is_finished, self.is_closed = name, owner, is_finished, False
        self.alias = alias

    def end(self) -> None:
        self.is_closed = True


def _disconnect(store: ResumeStore, streams: list[DisconnectedStream]) -> None:
    for one in streams:
        store.put(one)
        store.mark_detached(one)


@async_test
async def test_tenant_with_many_abandoned_streams_evicts_only_its_own() -> None:
    store, flood = ResumeStore(60.0), [DisconnectedStream(f"f{i}", "flood") for i in range(1000)]
    others = [DisconnectedStream(f"o{i}", f"owner {i % 10}") for i in range(100)]
    _disconnect(store, [*others, *flood])
    assert not any(one.is_closed for one in others)
    assert [one.is_closed for one in flood] == [True] * 844 + [False] * 156


@async_test
async def test_streams_read_to_the_end_are_evicted_first() -> None:
    store, broken = ResumeStore(60.0), [DisconnectedStream(f"b{i}") for i in range(200)]
    finished = [DisconnectedStream(f"f{i}", is_finished=True) for i in range(300)]
    _disconnect(store, [*broken, *finished])
    assert sum(not one.is_closed for one in (*broken, *finished)) == 256
    more = [DisconnectedStream(f"m{i}") for i in range(256)]
    _disconnect(store, more)
    assert not any(one.is_closed for one in more), "the oldest go if no client read to the end"
    assert all(one.is_closed for one in broken)


@async_test
async def test_stream_is_closed_after_its_time_out_unless_its_client_returns() -> None:
    store = ResumeStore(0.02)
    away, back = (DisconnectedStream(name, "a") for name in ("away", "back"))
    _disconnect(store, [away, back])
    store.mark_attached(back)
    assert store.find("away", "a") is away and store.find("away", "b") is None
    await asyncio.sleep(0.1)
    assert (away.is_closed, back.is_closed) == (True, False)
    assert store.find("away", "a") is None and store.find("back", "a") is back
    store.clear()
    assert back.is_closed and store.find("back", "a") is None
    at_once = DisconnectedStream("c")
    _disconnect(ResumeStore(0.0), [at_once])
    assert at_once.is_closed


def test_replay_buffer_replays_from_any_frame_it_keeps() -> None:
    journal = ReplayBuffer(limit=6)
    assert [journal.append(frame) for frame in (b"ab", b"cd", b"ef", b"gh")] == [b"ab", b"cd", b"ef", b"gh"]
    assert (journal.first, journal.next_number) == (1, 4)
    assert [list(journal.since(number, 100)) for number in (1, 3, 4)] == [[b"cd", b"ef", b"gh"], [b"gh"], []]
    assert list(journal.since(1, 4)) == [b"cd", b"ef"]
    journal.append(b"above the limit")
    assert (journal.first, list(journal.since(4, 4))) == (4, [b"above the limit"]), "the last stays, whatever its size"


@async_test
async def test_alias_finds_the_last_stream_of_its_own_owner_and_ends_with_it() -> None:
    store = ResumeStore(60.0)
    first, last = DisconnectedStream("a", "alice", alias="x"), DisconnectedStream("b", "alice", alias="x")
    other = DisconnectedStream("c", "bob", alias="a")
    _disconnect(store, [first, last, other])
    assert store.find("x", "alice") is last
    assert store.find("x", "bob") is None
    assert store.find("a", "alice") is first, "a name goes before an alias"
    assert store.find("a", "bob") is other, "an alias does not hide another owner's stream"
    store.clear()
    assert store.find("x", "alice") is None
