"""Prefix router: picks an engine by cached prefix and load. Properties, and important cases."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from app.common.types import Request
from app.engine_client.engine_pool import PrefixRouter, block_hashes

BLOCK = 4


def _drawn(draw: random.Random) -> tuple[int, ...]:
    """A prompt that often begins as others do."""
    return tuple(draw.randrange(2) for _ in range(draw.randrange(1, 40)))


def _request(prompt: tuple[int, ...], namespace: str = "", **more: object) -> Request:
    return Request(id="r", prompt=prompt, max_tokens=1, cache_namespace=namespace, **more)  # type: ignore[arg-type]


def _hashes(prompt: tuple[int, ...], namespace: str = "") -> list[int]:
    return block_hashes([_request(prompt, namespace)], BLOCK)


@given(st.integers(0, 2**32))
def test_two_prompts_share_as_many_names_as_whole_blocks_at_their_beginning(seed: int) -> None:
    draw = random.Random(seed)
    one = _drawn(draw)
    other = (*one[: draw.randrange(len(one) + 1)], *_drawn(draw))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    shared = set(_hashes(one)) & set(_hashes(other))
    assert len(shared) == same // BLOCK
    assert set(_hashes(one)[: same // BLOCK]) == shared
    assert not set(_hashes(one, "ann")) & set(_hashes(one, "bob")), "nothing is shared between tenants"


def test_names_of_a_batch_are_those_of_its_prompts_each_once_and_bounded() -> None:
    one, other = _request((1,) * 8 + (2,) * 4), _request((1,) * 8 + (3,) * 4)
    fork = _request((1,) * 8 + (2,) * 4, leader="r")
    assert set(block_hashes([one, fork, other], BLOCK)) == {*_hashes(one.prompt), *_hashes(other.prompt)}
    assert len(block_hashes([one, fork, other], BLOCK)) == 4
    assert len(block_hashes([_request(tuple(range(100_000)))], 1)) == 4096
    source = _request((1,) * 8, source=(1, 2))
    assert not set(block_hashes([source], BLOCK)) & set(_hashes((1,) * 8))


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_the_choice_keeps_the_bound_and_takes_the_longest_beginning_within_it(seed: int, n: int) -> None:
    draw, router = random.Random(seed), PrefixRouter(n)
    for _ in range(draw.randrange(12)):
        router.record(draw.randrange(n), _hashes(_drawn(draw)), 1000)
    loads = {engine: draw.randrange(draw.choice((2, 40))) for engine in draw.sample(range(n), draw.randint(1, n))}
    adding, hashes = draw.randint(1, 16), _hashes(_drawn(draw))
    chosen = router.choose(hashes, loads, adding)
    bound = math.ceil(1.25 * (sum(loads.values()) + adding) / len(loads))
    assert chosen in loads
    assert loads[chosen] == min(loads.values()) or loads[chosen] + adding <= bound
    for other, load in loads.items():
        if load + adding <= bound:
            assert router.n_cached(other, hashes) <= router.n_cached(chosen, hashes)
            if router.n_cached(other, hashes) == router.n_cached(chosen, hashes):
                assert loads[chosen] <= load


@given(st.integers(0, 2**32), st.integers(1, 30))
def test_what_is_remembered_is_bounded_and_is_whole_beginnings(seed: int, most: int) -> None:
    """A block that is known without the one before it would be counted, and be of no use."""
    draw, router = random.Random(seed), PrefixRouter(1)
    sent = [_drawn(draw) for _ in range(12)]
    chains = [_hashes(prompt) for prompt in sent]
    for hashes in chains:
        router.record(0, hashes, most)
        assert len(router._blocks_of[0]) <= most
        for names in chains:
            flags = [router.n_cached(0, [name]) for name in names]
            assert flags == sorted(flags, reverse=True)
        assert router.n_cached(0, hashes) == min(most, len(hashes))


def _simulate(n: int, prompts: list[tuple[int, ...]], lasting: int) -> tuple[list[int], list[list[int]]]:
    """Requests one after the other, each open for as long as so many others come: where they went, all loads."""
    router, open_at, went, loads = PrefixRouter(n), [0] * n, list[int](), list[list[int]]()
    for time, prompt in enumerate(prompts):
        if time >= lasting:
            open_at[went[time - lasting]] -= 1
        chosen = router.choose(_hashes(prompt), dict(enumerate(open_at)), 1)
        router.record(chosen, _hashes(prompt), 10_000)
        open_at[chosen] += 1
        went.append(chosen)
        loads.append(list(open_at))
    return went, loads


def test_a_conversation_stays_where_it_began() -> None:
    turns = [[(who,) * 8 + tuple(range(turn * 4)) for turn in range(1, 20)] for who in range(100, 108)]
    went, _ = _simulate(4, [turn for round_ in zip(*turns, strict=True) for turn in round_], lasting=4)
    by_who = [went[who::8] for who in range(8)]
    assert sum(len(set(engines)) == 1 for engines in by_who) >= 7
    assert len(set(went)) == 4


def test_a_beginning_that_everybody_shares_is_spread_as_far_as_the_load_asks() -> None:
    shared = (7,) * 64
    alone, _ = _simulate(4, [(*shared, *[i] * 4) for i in range(200)], lasting=1)
    assert set(alone) == {0}, "an engine that has it and has time"
    concurrent, loads = _simulate(4, [(*shared, *[i] * 4) for i in range(400)], lasting=64)
    assert set(concurrent) == {0, 1, 2, 3}
    assert max(max(loads[i]) for i in range(64, 400)) <= math.ceil(1.25 * 64 / 4) + 1


def test_what_shares_nothing_goes_round() -> None:
    went, _ = _simulate(3, [(i,) * 8 for i in range(30)], lasting=1)
    assert [went.count(engine) for engine in range(3)] == [10, 10, 10]


def test_an_engine_that_lost_its_cache_is_not_sought_for_it() -> None:
    router, hashes = PrefixRouter(2), _hashes((1,) * 20)
    router.record(1, hashes, 100)
    assert router.choose(hashes, {0: 0, 1: 0}, 1) == 1
    assert router.choose(hashes, {0: 0}, 1) == 0
    router.clear(1)
    assert router.n_cached(1, hashes) == 0 and router.choose(hashes, {0: 0, 1: 0}, 1) == 0
