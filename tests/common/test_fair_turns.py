"""Fair turns: shares, starvation, idle owners, corrected costs, bounded state; and the dynamic threshold."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.fair_turns import _MOST_DEBTORS, FairTurns, may_hold

_SEEDS = st.integers(0, 2**32)
_MAX_COST = 5.0


def _guess_nothing(_draw: random.Random, _cost: float) -> float:
    return 0.0


def _guess_exactly(_draw: random.Random, cost: float) -> float:
    return cost


def _guess_wrongly(draw: random.Random, _cost: float) -> float:
    return draw.uniform(0, _MAX_COST)


_Guess = Callable[[random.Random, float], float]
_GUESSES = st.sampled_from([_guess_nothing, _guess_exactly, _guess_wrongly])


class _Server:
    """Serves one piece of work at a time, whose costs are random within the owner's limit."""

    def __init__(self, seed: int, guess: _Guess, max_costs: dict[str, float]) -> None:
        self.turns, self.draw, self.spent = FairTurns[str](), random.Random(seed), Counter[str]()
        self._guess, self._max_costs = guess, max_costs
        self._costs: dict[str, float] = {}

    def wait(self, owner: str) -> None:
        cost = self._costs[owner] = self.draw.uniform(0.01, self._max_costs[owner])
        self.turns.wait(owner, self._guess(self.draw, cost))

    def serve(self, *, has_more: bool = False) -> str:
        owner = next(iter(self.turns))
        cost, charged = self._costs[owner], self.turns.begin(owner)
        if has_more:
            self.wait(owner)
        self.turns.end(owner, cost - charged)
        self.spent[owner] += cost  # type: ignore[assignment]
        return owner


@given(st.lists(st.floats(0.02, _MAX_COST), min_size=2, max_size=6), _GUESSES, _SEEDS)
def test_owners_with_work_get_equal_shares_within_a_maximum_cost(
    max_costs: list[float], guess: _Guess, seed: int
) -> None:
    """Within one maximum cost if costs are known, or not even estimated; within two if estimates are wrong."""
    server = _Server(seed, guess, {str(i): cost for i, cost in enumerate(max_costs)})
    for owner in server._max_costs:
        server.wait(owner)
    bound = max(max_costs) + (_MAX_COST if guess is _guess_wrongly else 0)
    for _ in range(200):
        server.serve(has_more=True)
        spent = [server.spent[owner] for owner in server._max_costs]
        assert max(spent) - min(spent) <= bound + 1e-9


@given(st.integers(1, 100), _GUESSES, _SEEDS)
def test_idle_time_gives_no_credit(n_before: int, guess: _Guess, seed: int) -> None:
    """An owner that comes late gets what the others get from then on, not what they got before."""
    server = _Server(seed, guess, dict.fromkeys("abc", _MAX_COST))
    for owner in "ab":
        server.wait(owner)
    for _ in range(n_before):
        server.serve(has_more=True)
    server.wait("c")
    before = server.spent.copy()
    for _ in range(100):
        server.serve(has_more=True)
        spent = [server.spent[owner] - before[owner] for owner in "abc"]
        assert max(spent) - min(spent) <= 3 * _MAX_COST


@given(_GUESSES, _SEEDS)
def test_an_owner_that_leaves_after_each_turn_gets_no_more_than_one_that_stays(guess: _Guess, seed: int) -> None:
    """Its work is ten times as costly, so it would profit if its debts were forgotten."""
    server = _Server(seed, guess, {"stays": _MAX_COST / 10, "leaves": _MAX_COST})
    server.wait("stays")
    for _ in range(500):
        if "leaves" not in server.turns:
            server.wait("leaves")
        server.serve(has_more=next(iter(server.turns)) == "stays")
        assert server.spent["leaves"] - server.spent["stays"] <= 3 * _MAX_COST


@given(_GUESSES, _SEEDS)
def test_no_owner_starves_while_new_ones_keep_coming(guess: _Guess, seed: int) -> None:
    """The owner with the most costly work is served before the newcomers have had twice its maximum cost."""
    server = _Server(seed, guess, {"costly": _MAX_COST})
    server.wait("costly")
    for number in range(10_000):
        server._max_costs[str(number)] = 0.1
        server.wait(str(number))
        if server.serve() == "costly":
            break
    assert sum(server.spent.values()) - server.spent["costly"] <= 2 * _MAX_COST


@given(st.integers(1, 8), _SEEDS)
def test_equal_costs_make_a_round_robin(n_owners: int, seed: int) -> None:
    """Owners come and leave at any time; one that comes is behind all that wait."""
    draw, turns, rotation = random.Random(seed), FairTurns[int](), deque[int]()
    for _ in range(200):
        owner = draw.randrange(n_owners)
        if owner not in rotation and draw.random() < 0.7:
            turns.wait(owner, 1)
            rotation.append(owner)
        elif draw.random() < 0.1:
            turns.leave(owner)
            if owner in rotation:
                rotation.remove(owner)
        if rotation and draw.random() < 0.7:
            taken = rotation.popleft()
            assert next(iter(turns)) == taken
            has_more, is_atomic = draw.random() < 0.8, draw.random() < 0.5
            if is_atomic:
                turns.take(taken, 1 if has_more else None)
            else:
                turns.begin(taken)
                turns.end(taken)
            if has_more:
                rotation.append(taken)
                if not is_atomic:
                    turns.wait(taken, 1)
        assert list(turns) == list(rotation)


def test_owner_that_was_passed_over_does_not_collect_turns() -> None:
    turns, order = FairTurns[str](), ""
    for owner in "abc":
        turns.wait(owner, 1)
    for number in range(20):
        taken = next(owner for owner in turns if owner != "a" or number >= 10)
        turns.take(taken, 1)
        order += taken
    assert order == "bcbcbcbcbc" + "abcabcabca"


class _PlainTurns:
    """The same order from a plain search, with all accounts kept."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.virtual: dict[int, float] = {}
        self.waiting: dict[int, tuple[float, int]] = {}
        self.running = Counter[int]()
        self.number = 0

    def wait(self, owner: int, estimate: float) -> None:
        self.number += 1
        floor = -1.0 if owner in self.waiting or self.running[owner] else self.clock
        self.virtual[owner] = max(floor, self.virtual.get(owner, self.clock))
        self.waiting[owner] = estimate, self.number

    def order(self) -> list[int]:
        def rank(owner: int) -> tuple[float, int]:
            estimate, number = self.waiting[owner]
            return self.virtual[owner] + estimate, number

        return sorted(self.waiting, key=rank)

    def begin(self, owner: int) -> float:
        estimate = self.waiting.pop(owner)[0]
        self.virtual[owner] += estimate
        self.clock = max(self.clock, self.virtual[owner])
        self.running[owner] += 1
        return estimate

    def end(self, owner: int, correction: float) -> None:
        self.virtual[owner] += correction
        self.running[owner] -= 1
        self.forget()

    def forget(self) -> None:
        if not self.waiting and not self.running.total():
            self.virtual.clear()
            self.clock = 0.0


@given(st.integers(1, 20), _SEEDS)
def test_several_servers_match_a_plain_search(n_owners: int, seed: int) -> None:
    draw, turns, plain, running = random.Random(seed), FairTurns[int](), _PlainTurns(), list[tuple[int, float]]()
    for _ in range(300):
        owner, action = draw.randrange(n_owners), draw.random()
        estimate = draw.choice([0.0, 1.0, draw.uniform(0, _MAX_COST)])
        if action < 0.4:
            turns.wait(owner, estimate)
            plain.wait(owner, estimate)
        elif action < 0.5:
            turns.leave(owner)
            if plain.waiting.pop(owner, None):
                plain.forget()
        elif action < 0.75 and plain.waiting:
            owner = draw.choice(plain.order()[:2])  # the caller may pass one over
            charged = turns.begin(owner)
            assert charged == plain.begin(owner)
            running.append((owner, charged))
        elif running:
            owner, charged = running.pop(draw.randrange(len(running)))
            correction = draw.uniform(0, _MAX_COST) - charged
            turns.end(owner, correction)
            plain.end(owner, correction)
        assert list(turns) == plain.order()
        assert all((each in turns) == (each in plain.waiting) for each in range(n_owners))


@pytest.mark.parametrize("cost", [0.0, 1.0, 100.0])
def test_state_is_bounded_however_many_owners_come_and_whatever_they_leave_behind(cost: float) -> None:
    turns = FairTurns[int]()
    turns.wait(-1, 1.0)  # someone waits, so that debts count
    for owner in range(5_000):
        turns.wait(owner)
        turns.end(owner, cost + owner - turns.begin(owner))
        assert len(turns._accounts) <= _MOST_DEBTORS + 2 and len(turns._debtors) <= _MOST_DEBTORS + 1
    turns.leave(-1)
    assert not turns._accounts and not turns._debtors and not turns._order


def _microseconds_per_turn(n_owners: int) -> float:
    turns, rounds = FairTurns[int](), 2_000
    for owner in range(n_owners):
        turns.wait(owner, 1.0 + owner % 7)
    started = time.process_time()
    for _ in range(rounds):
        owner = next(iter(turns))
        turns.begin(owner)
        turns.end(owner)
        turns.wait(owner, 1.0 + owner % 7)
    return (time.process_time() - started) / rounds * 1e6


def test_a_turn_costs_about_the_same_among_ten_and_among_ten_thousand_owners() -> None:
    ratios = [_microseconds_per_turn(10_000) / _microseconds_per_turn(10) for _ in range(5)]
    assert min(ratios) < 10, "a search over all owners would cost a thousand times as much"


@pytest.mark.parametrize(("factor", "lone"), [(1, 32), (7, 56)])
def test_threshold_bounds_a_lone_owner_and_leaves_something_for_the_next(factor: float, lone: int) -> None:
    held: dict[str, int] = {}
    for owner in "abc":
        held[owner] = 0
        while may_hold(held[owner], 1, 64 - sum(held.values()), factor=factor) and sum(held.values()) < 64:
            held[owner] += 1
    assert held["a"] == lone and all(held.values()), held


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(1, 10), st.floats(0.1, 16))
def test_threshold_never_exceeds_its_factor_and_a_first_entry_always_fits(
    used: int, free: int, added: int, factor: float
) -> None:
    assert may_hold(0, added, 0, factor=factor)
    assert may_hold(used, added, free, factor=factor) == (used + added <= factor * free)
