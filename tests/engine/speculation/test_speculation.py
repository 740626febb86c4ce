"""Which drafts a step verifies: those that give most tokens a second, by the measured costs of steps."""

from __future__ import annotations

import itertools
import random
from array import array
from threading import Event

import pytest

from app.common.types import Request
from app.engine.scheduling.batch_plan import Sequence
from app.engine.speculation.proposer import Proposal
from app.engine.speculation.speculation import MOST_DRAFTS, Speculation
from app.engine.speculation.step_costs import MOST_ROWS, StepCosts, measure

FLAT = {1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0}
"""Rows that cost nothing: bound by memory."""
LINEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 16.0, 32: 32.0}
"""Rows that cost as much as steps: bound by computing."""
TYPICAL = {1: 1.0, 2: 1.1, 4: 1.2, 8: 1.6, 16: 2.4, 32: 4.0}


class Fixed:
    """A proposer with the same proposal for each sequence of a name."""

    def __init__(self, proposals: dict[str, tuple[float, ...]]) -> None:
        self.chances = proposals
        self.asked = 0

    def propose(self, sequence: Sequence, most: int) -> Proposal:
        self.asked += 1
        chances = self.chances[sequence.request.id][:most]
        return Proposal(tuple(range(len(chances))), chances)

    def forget(self, sequence: Sequence) -> None:
        """Keeps nothing."""


def _sequences(*names: str, namespace: str = "", grammar: str = "") -> list[Sequence]:
    fields = {"prompt": (1,), "max_tokens": 99, "cache_namespace": namespace, "grammar": grammar}
    return [Sequence(request=Request(id=n, **fields), tokens=array("q", [1]), arrival=0) for n in names]  # type: ignore[arg-type]


def _counts(costs: dict[int, float], chances: dict[str, tuple[float, ...]], rows: int = 64) -> list[int]:
    planned = Speculation(Fixed(chances), StepCosts(costs)).drafts(_sequences(*chances), [99] * len(chances), rows)
    return [len(drafts) for drafts in planned] or [0] * len(chances)


def test_the_number_of_drafts_gives_most_tokens_a_second() -> None:
    """Against all numbers of drafts for each of two sequences."""
    rng = random.Random(1)
    for _ in range(200):
        chances = {name: tuple(sorted((rng.random() for _ in range(rng.randint(0, 6))), reverse=True)) for name in "ab"}
        costs = StepCosts(TYPICAL)

        def rate(counts: tuple[int, ...], chances: dict[str, tuple[float, ...]] = chances) -> float:
            expected = 2 + sum(sum(each[:n]) for each, n in zip(chances.values(), counts, strict=True))
            return expected / costs.of(2 + sum(counts))  # noqa: B023

        best = max(map(rate, itertools.product(range(7), range(7))))
        chosen = tuple(_counts(TYPICAL, chances))
        assert rate(chosen) >= best / 1.02


def test_free_rows_take_all_drafts_and_dear_ones_none() -> None:
    chances = {"a": (0.9, 0.8, 0.7), "b": (0.6,)}
    assert _counts(FLAT, chances) == [3, 1]
    assert _counts(LINEAR, chances) == [0, 0]


def test_certain_drafts_are_not_even_looked_up_where_rows_cost_as_much_as_they_give() -> None:
    proposer = Fixed({"a": (1.0,) * 8})
    assert Speculation(proposer, StepCosts(LINEAR)).drafts(_sequences("a"), [99], 64) == []
    assert proposer.asked == 0


def test_limits_of_rows_and_room_are_kept() -> None:
    chances = {"a": (0.9,) * 40, "b": (0.9,) * 40}
    speculation = Speculation(Fixed(chances), StepCosts(FLAT))
    for room, rows in (([3, 0], 64), ([99, 99], 7), ([99, 99], 2), ([-1, 99], 64), ([99, 99], 500)):
        planned = speculation.drafts(_sequences("a", "b"), room, rows)
        lengths = [len(drafts) for drafts in planned] or [0, 0]
        assert 2 + sum(lengths) <= min(rows, MOST_ROWS)
        assert all(length <= max(0, min(most, MOST_DRAFTS)) for length, most in zip(lengths, room, strict=True))


def test_drafts_of_one_tenant_make_the_step_of_others_a_quarter_longer_at_most() -> None:
    chances = {"a": (0.99,) * 24, "b": ()}
    speculation = Speculation(Fixed(chances), costs := StepCosts(TYPICAL))
    alone = speculation.drafts(_sequences("a", "b", namespace="ann"), [99, 99], 64)
    shared = speculation.drafts([*_sequences("a", namespace="ann"), *_sequences("b", namespace="bob")], [99, 99], 64)
    assert costs.of(2 + len(alone[0])) > 1.5 * costs.of(2)
    assert costs.of(2 + len(shared[0])) <= 1.25 * costs.of(2)


def test_guided_drafts_are_cut_to_what_the_grammar_allows() -> None:
    chances = {"a": (0.9,) * 5}
    guided = _sequences("a", grammar="any")
    costs = StepCosts(FLAT)
    assert Speculation(Fixed(chances), costs, allow=lambda _s, d: d[:2]).drafts(guided, [99], 64) == [(0, 1)]
    assert Speculation(Fixed(chances), costs).drafts(guided, [99], 64) == [()]


def test_costs_between_measured_rows_are_interpolated_and_never_fall() -> None:
    costs = StepCosts({1: 2.0, 2: 1.9, 4: 3.0, 8: 5.0})
    assert [costs.of(rows) for rows in (1, 2, 4, 6, 8, 16)] == [1.0, 1.0, 1.5, 2.0, 2.5, 4.5]
    ratios = [costs.of(rows) for rows in range(1, MOST_ROWS + 1)]
    assert ratios == sorted(ratios)


def test_steps_correct_a_wrong_measurement() -> None:
    costs, rng = StepCosts(FLAT), random.Random(5)
    for _ in range(4000):
        rows = rng.choice([1, 8])
        costs.observe(rows, {1: 0.010, 8: 0.020}[rows] * rng.uniform(0.9, 1.1))
    assert costs.of(8) / costs.of(1) == pytest.approx(2, rel=0.15)


def test_longer_contexts_change_no_ratio() -> None:
    costs = StepCosts(TYPICAL)
    for number in range(3000):
        rows = (1, 8)[number % 2]
        costs.observe(rows, TYPICAL[rows] * (1 + number / 1000))
    assert costs.of(8) / costs.of(1) == pytest.approx(1.6, rel=0.1)


def test_one_step_that_takes_long_changes_little() -> None:
    costs = StepCosts(TYPICAL)
    costs.observe(1, 1.0)
    costs.observe(8, 1e6)
    assert costs.of(8) / costs.of(1) < 1.8


def test_measuring_stops_early_where_steps_take_long() -> None:
    measured: list[int] = []

    def run(rows: int) -> None:
        measured.append(rows)
        deadline.wait(0.06)

    deadline = Event()
    measure(run, 256)
    assert measured == [1, 2], "at least two numbers of rows, once each"
    measured.clear()
    measure(lambda rows: measured.append(rows), 4)
    assert set(measured) == {1, 2, 4}
