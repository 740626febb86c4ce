"""Eviction queue: which connection is evicted for which, without real connections."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections import Counter

from app.http.connection_limits import ConnectionLimits, EvictionQueue, ReceivePhase
from tests.support.http.framing_harness import LIMITS


class _Transport(asyncio.Transport):
    """Records whether it was aborted."""

    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def _connections(most: int, of_one: int) -> ConnectionLimits:
    return ConnectionLimits(dataclasses.replace(LIMITS, connections=most, per_address=of_one))


def test_idle_connections_are_evicted_before_silent_ones_and_those_before_partial_heads() -> None:
    connections = _connections(5, 5)
    waits = [ReceivePhase.HEAD, ReceivePhase.NEW, ReceivePhase.NEW]
    waits += [ReceivePhase.LINGER, ReceivePhase.DONE]
    clients = [_Transport() for _ in waits]
    for client, wait in zip(clients, waits, strict=True):
        assert connections.register(client, "a")
        connections.mark_idle(client, wait)
    went = []
    for _ in clients:
        late = _Transport()
        assert connections.register(late, "b")
        connections.mark_active(late)
        went += [number for number, client in enumerate(clients) if client.is_aborted and number not in went]
    assert went == [4, 1, 2, 0, 3]
    assert not connections.register(_Transport(), "b")
    cut = connections.cut_by_reason
    assert (cut["made_room"], cut["address"], cut["full"]) == (5, 1, 0)


def test_address_with_the_most_connections_loses_one() -> None:
    queue = EvictionQueue()
    slow, *many = (_Transport() for _ in range(4))
    queue.put(slow, "slow", ReceivePhase.DONE)
    for client in many:
        queue.put(client, "many", ReceivePhase.HEAD)
    assert queue.next_victim() is many[0]
    queue.remove(many[0])
    queue.remove(many[1])
    assert queue.next_victim() is slow, "both addresses have one; this one waits longer"


def test_random_steps_match_a_plain_list() -> None:
    rng = random.Random(7)
    queue = EvictionQueue()
    plain: dict[asyncio.Transport, tuple[ReceivePhase, int]] = {}
    clients: dict[asyncio.Transport, str] = {_Transport(): rng.choice("aaaabbcdefg") for _ in range(60)}
    for step in range(5_000):
        client = rng.choice([*clients])
        if rng.random() < 0.6:
            wait = rng.choice([*ReceivePhase])
            queue.put(client, clients[client], wait)
            if client not in plain or plain[client][0] is not wait:
                plain[client] = wait, step
        else:
            queue.remove(client)
            plain.pop(client, None)
        sizes = Counter(clients[each] for each in plain)
        first = queue.next_victim()
        assert (first is None) == (not plain)
        if first:
            assert sizes[clients[first]] == max(sizes.values())
            assert first is min((each for each in plain if clients[each] == clients[first]), key=plain.__getitem__)


def test_connection_beyond_the_limit_costs_microseconds() -> None:
    connections = _connections(4096, 2048)
    began = time.process_time()
    for i in range(10_000):
        assert connections.register(_Transport(), f"{i % 4}")
    assert connections.count == 4096
    assert (time.process_time() - began) / 10_000 < 50e-6
