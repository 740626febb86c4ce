"""Rows that are each a text by itself, of their own length: lines, and pairs of source and target.

Knows how they are padded and in which order they come, not where they are from. Shape legend: as in model/batch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.batch import IGNORED, Batch
from model.shuffle import Shuffle
from model.vocabulary import END


@dataclass(frozen=True, slots=True)
class Example:
    """One row: every token but the first is a target."""

    tokens: list[int]
    source: list[int] | None = None
    """What the encoder reads; all examples of a run have one, or none has."""


class Examples:
    """Which examples a step sees: a pure function of (seed, step)."""

    def __init__(self, examples: Sequence[Example], *, rows: int, seed: int) -> None:
        self.examples, self.rows = examples, rows
        self._shuffle = Shuffle(len(examples), seed=seed)

    def batch(self, step: int) -> Batch:
        """`rows` examples."""
        places = range(step * self.rows, (step + 1) * self.rows)
        return padded([self.examples[self._shuffle(place)[1]] for place in places])


def padded(examples: Sequence[Example]) -> Batch:
    """The examples as they are, made equally long behind their ends."""
    inputs_RN = _matrix([example.tokens[:-1] for example in examples], END)
    targets_RN = _matrix([example.tokens[1:] for example in examples], IGNORED)
    sources = [example.source for example in examples if example.source is not None]
    if not sources:
        return Batch(inputs_RN=inputs_RN, targets_RN=targets_RN)
    real_RS = _matrix([[1] * len(source) for source in sources], 0).bool()
    return Batch(inputs_RN=inputs_RN, targets_RN=targets_RN, source_RS=_matrix(sources, END), real_RS=real_RS)


def _matrix(rows: Sequence[list[int]], padding: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
