"""The resume store: who may resume a stream, for how long, and what makes room in a full one."""

from __future__ import annotations

import asyncio

import pytest

from app.api.resume_store import ReplayBuffer, ResumeStore, StoredStream
from tests.support.async_test import async_test


class Stream(StoredStream):
    """A stream that records what the store does to it."""

    def __init__(self, store: ResumeStore, name: str, owner: str = "", *, is_finished: bool = False) -> None:
        super().__init__(store, name=name, owner=owner, replay_bytes=8)
        self.is_finished, self.is_closed, self.pauses = is_finished, False, 0

    def close(self) -> None:
        super().close()
        self.is_closed = True

    def _suspend(self) -> None:
        self.pauses += 1

    def disconnect(self) -> Stream:
        self.detach(self.attach())
        return self


@pytest.mark.parametrize(("limit", "kept"), [(0, ["c"]), (1, ["c"]), (2, ["b", "c"]), (3, ["a", "b", "c"])])
def test_a_replay_buffer_keeps_what_fits_and_always_the_newest(limit: int, kept: list[str]) -> None:
    buffer = ReplayBuffer(limit)
    assert [buffer.append(frame) for frame in (b"a", b"b", b"c")] == [b"a", b"b", b"c"]
    assert (buffer.first, buffer.next_number) == (3 - len(kept), 3)
    assert [buffer.since(number).decode() for number in range(buffer.first, 4)] == [
        "".join(kept[index:]) for index in range(len(kept) + 1)
    ]
    stream = Stream(ResumeStore(1.0), "s")
    stream._replay_buffer = buffer
    assert [stream.can_replay_from(number) for number in range(5)] == [
        buffer.first <= number <= 3 for number in range(5)
    ]


@async_test
async def test_only_its_owner_finds_a_stream_and_only_until_its_time_is_over() -> None:
    store = ResumeStore(0.02)
    stream, kept = Stream(store, "a", "ann").disconnect(), Stream(store, "b", "ann").disconnect()
    assert (store.find("a", "ann"), store.find("a", "bob"), store.find("x", "ann")) == (stream, None, None)
    kept.attach()
    await asyncio.sleep(0.1)
    assert (stream.is_closed, store.find("a", "ann"), kept.is_closed) == (True, None, False)
    at_once = Stream(ResumeStore(0.0), "c").disconnect()
    assert at_once.is_closed


@async_test
async def test_a_newer_connection_replaces_the_one_before() -> None:
    store = ResumeStore(60.0)
    stream = Stream(store, "a")
    first, second = stream.attach(), stream.attach()
    stream.detach(first)
    assert stream.pauses == 0, "another connection reads it"
    stream.detach(second)
    stream.detach(second)
    assert stream.pauses == 1
    store.clear()
    assert stream.is_closed and store.find("a", "") is None


@async_test
async def test_a_tenant_that_leaves_many_streams_evicts_only_its_own() -> None:
    store = ResumeStore(60.0)
    others = [Stream(store, f"o{i}", f"owner {i % 10}").disconnect() for i in range(100)]
    flood = [Stream(store, f"f{i}", "flood").disconnect() for i in range(1000)]
    assert not any(one.is_closed for one in others)
    assert [one.is_closed for one in flood] == [True] * 844 + [False] * 156
    store.clear()


@async_test
async def test_streams_that_were_read_to_their_end_make_room_first() -> None:
    store = ResumeStore(60.0)
    broken = [Stream(store, f"b{i}").disconnect() for i in range(200)]
    finished = [Stream(store, f"f{i}", is_finished=True).disconnect() for i in range(300)]
    assert sum(not one.is_closed for one in (*broken, *finished)) == 256
    more = [Stream(store, f"m{i}").disconnect() for i in range(256)]
    assert not any(one.is_closed for one in more), "the oldest go where all broke off"
    assert all(one.is_closed for one in broken)
    store.clear()
