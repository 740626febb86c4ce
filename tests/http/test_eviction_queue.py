"""Eviction queue: which connection is evicted for which, without real connections."""

from __future__ import annotations

import random
import time

from app.http.connection_limits import ConnectionLimits, EvictionQueue, HttpLimits, WaitReason


class _Guest:
    """Knows whether it was sent off."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_off = False

    def abort(self) -> None:
        self.is_off = True


def _connections(most: int, of_one: int) -> ConnectionLimits:
    numbers = {"header_bytes": 1, "headers": 1, "url_bytes": 1}
    seconds = dict.fromkeys(("head_seconds", "body_seconds", "write_seconds", "idle_seconds", "response_seconds"), 1.0)
    return ConnectionLimits(HttpLimits(connections=most, per_address=of_one, **numbers, **seconds))


def test_the_idle_go_before_the_silent_and_those_before_half_a_head() -> None:
    connections = _connections(5, 5)
    guests = [_Guest("a") for _ in range(5)]
    for guest, wait in zip(
        guests,
        [
            WaitReason.HEADERS,
            WaitReason.FIRST_BYTE,
            WaitReason.FIRST_BYTE,
            WaitReason.CLIENT_CLOSE,
            WaitReason.NEXT_REQUEST,
        ],
        strict=True,
    ):
        assert connections.register(guest)
        connections.mark_idle(guest, wait)
    went = []
    for _ in range(5):
        late = _Guest("b")
        assert connections.register(late)
        connections.mark_active(late)
        went += [number for number, guest in enumerate(guests) if guest.is_off and number not in went]
    assert went == [4, 1, 2, 0, 3]
    assert not connections.register(_Guest("b"))
    cut = connections.cut_by_reason
    assert (cut["made_room"], cut["address"], cut["full"]) == (5, 1, 0)


def test_the_address_with_the_most_gives_one_up() -> None:
    crowd = EvictionQueue()
    slow = _Guest("slow")
    crowd.put(slow, WaitReason.NEXT_REQUEST)
    many = [_Guest("many") for _ in range(3)]
    for guest in many:
        crowd.put(guest, WaitReason.HEADERS)
    assert crowd.next_victim() is many[0]
    crowd.remove(many[0])
    crowd.remove(many[1])
    assert crowd.next_victim() is slow, "as many as the other, and for longer"


def test_twenty_thousand_random_steps_against_a_plain_list() -> None:
    rng = random.Random(7)
    crowd, plain = EvictionQueue(), {}
    guests = [_Guest(rng.choice("aaaabbcdefg")) for _ in range(60)]
    for step in range(20_000):
        guest = rng.choice(guests)
        if rng.random() < 0.6:
            wait = rng.choice(list(WaitReason))
            crowd.put(guest, wait)
            if plain.get(guest, (None,))[0] is not wait:
                plain[guest] = wait, step
        else:
            crowd.remove(guest)
            plain.pop(guest, None)
        sizes = [sum(g.address == a for g in plain) for a in "abcdefg"]
        first = crowd.next_victim()
        assert (first is None) == (not plain)
        if first:
            assert sum(g.address == first.address for g in plain) == max(sizes)
            assert first is min((g for g in plain if g.address == first.address), key=plain.__getitem__)


def test_a_flood_at_the_limit_costs_microseconds_each() -> None:
    connections = _connections(4096, 2048)
    began = time.process_time()
    for i in range(40_000):
        assert connections.register(_Guest(f"{i % 4}"))
    assert connections.count == 4096
    assert (time.process_time() - began) / 40_000 < 50e-6
