"""Eviction from a full resume store; tests/api/test_resumed_streams.py covers the rest of it."""

from __future__ import annotations

from app.api.resume_store import ResumeStore
from tests.support.async_test import async_test


class DisconnectedStream:
    """A stream whose client disconnected before its end."""

    is_finished = False

    def __init__(self, name: str, owner: str) -> None:
        self.name, self.owner, self.is_closed = name, owner, False

    def close(self) -> None:
        self.is_closed = True


@async_test
async def test_a_tenant_that_leaves_many_streams_evicts_only_its_own() -> None:
    store, flood = ResumeStore(60.0), [DisconnectedStream(f"f{i}", "flood") for i in range(1000)]
    others = [DisconnectedStream(f"o{i}", f"owner {i % 10}") for i in range(100)]
    for one in (*others, *flood):
        store.put(one)
        store.mark_detached(one)
    assert not any(one.is_closed for one in others)
    assert [one.is_closed for one in flood] == [True] * 844 + [False] * 156
