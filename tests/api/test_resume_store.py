"""Eviction from a full resume store; tests/api/test_resumed_streams.py covers the rest of it."""

from __future__ import annotations

from app.api.resume_store import ResumeStore
from tests.support.async_test import async_test


class DisconnectedStream:
    """A stream whose client disconnected before its end, or after it."""

    def __init__(self, name: str, owner: str = "", *, is_finished: bool = False) -> None:
        self.name, self.owner, self.is_finished, self.is_closed = name, owner, is_finished, False

    def close(self) -> None:
        self.is_closed = True


def _disconnect(store: ResumeStore, streams: list[DisconnectedStream]) -> None:
    for one in streams:
        store.put(one)
        store.mark_detached(one)


@async_test
async def test_a_tenant_that_leaves_many_streams_evicts_only_its_own() -> None:
    store, flood = ResumeStore(60.0), [DisconnectedStream(f"f{i}", "flood") for i in range(1000)]
    others = [DisconnectedStream(f"o{i}", f"owner {i % 10}") for i in range(100)]
    _disconnect(store, [*others, *flood])
    assert not any(one.is_closed for one in others)
    assert [one.is_closed for one in flood] == [True] * 844 + [False] * 156


@async_test
async def test_streams_that_were_read_to_their_end_make_room_first() -> None:
    store, broken = ResumeStore(60.0), [DisconnectedStream(f"b{i}") for i in range(200)]
    finished = [DisconnectedStream(f"f{i}", is_finished=True) for i in range(300)]
    _disconnect(store, [*broken, *finished])
    assert sum(not one.is_closed for one in (*broken, *finished)) == 256
    more = [DisconnectedStream(f"m{i}") for i in range(256)]
    _disconnect(store, more)
    assert not any(one.is_closed for one in more), "the oldest go where all broke off"
    assert all(one.is_closed for one in broken)
