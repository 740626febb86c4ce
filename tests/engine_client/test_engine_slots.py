"""Slots of an engine: how tenants share them, and that the counters match the requests."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.types import Request
from app.engine_client.engine_slots import EngineSlots
from app.engine_client.request_queue import prompt_tokens


def _request(name: str, tenant: str = "", *, prompt: int = 1, grammar: str = "") -> Request:
    return Request(id=name, prompt=(1,) * prompt, max_tokens=9, cache_namespace=tenant, grammar=grammar)


def _fill(slots: EngineSlots, tenant: str) -> int:
    """Sends and starts requests of one tenant as long as there is capacity."""
    for number in range(1000):
        request = _request(f"{tenant}{number}", tenant)
        if not slots.has_capacity(request):
            return number
        slots.take(request)
        slots.mark_started(request.id)
    raise AssertionError("no bound")


@pytest.mark.parametrize("max_running", [1, 2, 4, 7, 8, 9, 16, 33, 256])
def test_lone_tenant_leaves_an_eighth_of_the_slots_and_the_next_ones_find_some(max_running: int) -> None:
    slots = EngineSlots(max_running, 256)
    assert _fill(slots, "ann") == max_running - max_running // 8
    assert _fill(slots, "bob") >= 1
    if max_running >= 256:
        assert [_fill(slots, tenant) for tenant in ("cyd", "dan", "eve")] == [4, 1, 1]


@pytest.mark.parametrize(("max_running", "capacity"), [(1, 2), (4, 5), (8, 10), (32, 40), (256, 264)])
def test_without_keys_all_slots_and_the_prefetch_are_taken(max_running: int, capacity: int) -> None:
    assert _fill(EngineSlots(max_running, 256), "") == capacity


def test_grammars_that_are_compiled_take_no_capacity_and_tokens_count_until_the_start() -> None:
    slots = EngineSlots(8, 10)
    for number in range(10):
        request = _request(f"g{number}", grammar="start: /a/")
        assert slots.has_capacity(request)
        slots.take(request)
    assert not slots.has_capacity(_request("g", grammar="start: /a/")) and slots.n_compiling == 10
    slots.take(_request("long", "ann", prompt=10))
    assert not slots.has_capacity(_request("next", "ann")) and slots.has_capacity(_request("other", "bob"))
    slots.mark_started("long")
    assert slots.has_capacity(_request("next", "ann"))


@given(st.integers(0, 2**32))
def test_counters_match_the_requests(seed: int) -> None:
    draw, slots = random.Random(seed), EngineSlots(8, 10)
    held, unstarted = dict[str, Request](), dict[str, Request]()
    for number in range(200):
        request = _request(f"r{number}", draw.choice("ab"), prompt=draw.randrange(1, 5), grammar=draw.choice(["", "g"]))
        match draw.randrange(6):
            case 0:
                slots.hold(request)
                held[request.id] = request
            case 1 | 2:
                request = draw.choice([request, *(r for r in held.values() if r.id not in unstarted)])
                slots.take(request)
                held[request.id] = unstarted[request.id] = request
            case 3:
                name = draw.choice([*held, "unknown"])
                slots.mark_started(name)
                unstarted.pop(name, None)
            case 4:
                name = draw.choice([*held, "unknown"])
                slots.release(name)
                held.pop(name, None)
                unstarted.pop(name, None)
            case _ if draw.random() < 0.1:
                slots.hold_all()
                unstarted.clear()
            case _:
                pass
        compiling = {name for name, each in unstarted.items() if each.grammar}
        assert slots.n_compiling == len(compiling)
        for key, usage in slots._usage.items():
            names = {n for n, each in held.items() if (each.cache_namespace, n in compiling) == key}
            assert usage.slots == len(names) > 0
            assert usage.unread_tokens == sum(prompt_tokens(unstarted[n]) for n in names if n in unstarted)
        assert sum(usage.slots for usage in slots._usage.values()) == len(held)
