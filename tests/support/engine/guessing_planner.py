"""Draft planners for tests: they draft what a function guesses, in every step that may have drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items

from app.common.types import SampledEvent
from app.engine.execution.engine import Engine
from app.engine.scheduling.batch_plan import Sequence
from app.engine.speculation.speculation import Allow

Guess = Callable[[Sequence], Items[int]]
"""Guesses of the tokens after the known ones."""


class GuessingPlanner:
    """A DraftPlanner without costs."""

    def __init__(self, guess: Guess, *, allow: Allow = lambda _sequence, drafts: drafts) -> None:
        """allow: for guided sequences."""
        self.guess = guess
        self.ended: list[str] = []
        self._allow = allow

    def drafts(self, sequences: Items[Sequence], room: Items[int], most_rows: int) -> list[tuple[int, ...]]:
        """See DraftPlanner."""
        left, planned = most_rows - len(sequences), list[tuple[int, ...]]()
        for sequence, most in zip(sequences, room, strict=True):
            drafts = tuple(self.guess(sequence))[: max(0, min(most, left))]
            if sequence.request.grammar and drafts:
                drafts = self._allow(sequence, drafts)
            planned.append(drafts)
            left -= len(drafts)
        return planned

    def forget(self, sequence: Sequence) -> None:
        """See DraftPlanner."""
        self.ended.append(sequence.request.id)


def guess_from(expected: Mapping[str, Items[SampledEvent]], *, vocab: int, seed: int = 0, most: int = 5) -> Guess:
    """Guesses up to `most` tokens that each request will have, most of them right, and one more, which hardly is."""
    rng = random.Random(seed)

    def guess(sequence: Sequence) -> list[int]:
        following = expected[sequence.request.id][sequence.num_generated :]
        right = [event.token for event in following if event.token is not None][: rng.randint(0, most)]
        guesses = [token if rng.random() < 0.8 else rng.randrange(vocab) for token in right]
        return [*guesses, rng.randrange(vocab)]

    return guess


def speculating(engine: Engine, guess: Guess, *, allow: Allow = lambda _sequence, drafts: drafts) -> Engine:
    """The engine, with drafts in its steps."""
    engine.scheduler.draft_planner = GuessingPlanner(guess, allow=allow)
    return engine
