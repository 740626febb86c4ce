"""Decides which drafts a step verifies: as many as write more tokens in a second than the step without them.

A step of n rows writes n tokens. A draft adds a row, and as many tokens as its chance to be accepted. All drafts of all
sequences are ordered by that chance, and the best number of them is taken, by the expected tokens for each second. At
high load a row costs as much as it is worth even if its draft is certain: then nothing is proposed at all.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from app.engine.scheduling.batch_plan import Sequence
from app.engine.speculation.proposer import Proposal, Proposer
from app.engine.speculation.step_costs import MOST_ROWS, StepCosts

MOST_DRAFTS = 24
"""Drafts of a sequence in a step."""
_LEAST_GAIN = 1.02
"""Expected gain from which on drafts are verified: chances and costs are estimates."""
_MOST_SHARED_COST = 1.25
"""A step of several cache namespaces may take this much longer: its other rows get nothing for the time."""

_PATIENCE, _IDLE_INTERVAL = 16, 4
"""After so many steps without drafts only one step of four looks for any: a lookup takes 10 us on a slow core."""

Allow = Callable[[Sequence, tuple[int, ...]], tuple[int, ...]]
"""The drafts up to the first one that cannot be sampled."""


class Speculation:
    """The DraftPlanner of the scheduler: a proposer, and the costs of steps."""

    def __init__(self, proposer: Proposer, costs: StepCosts, *, allow: Allow | None = None) -> None:
        """allow: applied to the drafts of guided sequences; without it they get none."""
        self.costs = costs
        self._proposer = proposer
        self._allow = allow
        self._n_idle = 0
        """Steps since the last one with drafts."""

    def drafts(self, sequences: Items[Sequence], room: Items[int], most_rows: int) -> list[tuple[int, ...]]:
        """The drafts of each sequence that decodes in a step; none at all: [].

        room: the most drafts that each may have. most_rows: of the step, `sequences` included.
        """
        count, most_rows = len(sequences), min(most_rows, MOST_ROWS)
        self._n_idle += 1
        is_skipped = self._n_idle > _PATIENCE and self._n_idle % _IDLE_INTERVAL
        if is_skipped or not self._can_pay(count, most_rows):
            return []
        proposals = [
            self._proposer.propose(sequence, min(most, MOST_DRAFTS)) if most > 0 else Proposal()
            for sequence, most in zip(sequences, room, strict=True)
        ]
        lengths = self._choose([proposal.chances for proposal in proposals], most_rows, sequences)
        if not any(lengths):
            return []
        self._n_idle = 0
        chosen = [proposal.tokens[:length] for proposal, length in zip(proposals, lengths, strict=True)]
        return [self._allowed(sequence, drafts) for sequence, drafts in zip(sequences, chosen, strict=True)]

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._proposer.forget(sequence)

    def _can_pay(self, count: int, most_rows: int) -> bool:
        """Whether drafts would pay if all of them were accepted."""
        if count >= most_rows:
            return False
        of = self.costs.of
        least = _LEAST_GAIN * count / of(count)
        return any(
            rows / of(rows) >= least
            for rows in (count + 1, min(count + 4, most_rows), min(2 * count, most_rows), most_rows)
        )

    def _choose(self, chances: Items[tuple[float, ...]], most_rows: int, sequences: Items[Sequence]) -> list[int]:
        """How many drafts each sequence gets."""
        count, of = len(chances), self.costs.of
        ordered = sorted(((chance, index) for index, each in enumerate(chances) for chance in each), reverse=True)
        if not ordered:
            return [0] * count
        most_cost = float("inf")
        if len({sequence.request.cache_namespace for sequence in sequences}) > 1:
            most_cost = _MOST_SHARED_COST * of(count)
        expected, taken, best = float(count), 0, _LEAST_GAIN * count / of(count)
        for number, (chance, _) in enumerate(ordered[: most_rows - count], 1):
            expected += chance
            cost = of(count + number)
            if cost > most_cost:
                break
            if expected / cost > best:
                best, taken = expected / cost, number
        lengths = [0] * count
        for _, index in ordered[:taken]:
            lengths[index] += 1
        return lengths

    def _allowed(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        if not drafts or not sequence.request.grammar:
            return drafts
        return self._allow(sequence, drafts) if self._allow else ()
