"""Training batches as tensors: input tokens, target tokens, and sources if there is an encoder.

Windows of running text are equally long; rows that are each a text by itself are padded behind their ends.
Shape legend: R rows, N tokens of each, S tokens of each source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor

from model.train.data.vocabulary import END

IGNORED = -100
"""The target where nothing is to be learnt: padding."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row: every token but the first is a target."""

    tokens: list[int]
    source: list[int] | None = None
    """What the encoder reads; all examples of a run have one, or none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputs:
    """What the encoder reads."""

    tokens_RS: Tensor
    real_RS: Tensor
    """True for a source's tokens, False for its padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one length, the shorter ones padded at their end. Every row starts at position 0."""

    inputs_RN: Tensor
    targets_RN: Tensor
    """What follows each input, or IGNORED."""
    sources: EncoderInputs | None = None

    @property
    def n_targets(self) -> int:
        """Targets that count."""
        return int(self.targets_RN.ne(IGNORED).sum())

    @property
    def row_tokens(self) -> int:
        """Tokens that one row makes the network compute."""
        return self.inputs_RN.shape[1] + (0 if self.sources is None else self.sources.tokens_RS.shape[1])

    def split(self, rows: int) -> list[Batch]:
        """The same rows, at most `rows` at once."""
        inputs, targets = self.inputs_RN.split(rows), self.targets_RN.split(rows)
        sources: Iterable[EncoderInputs | None] = repeat(None, len(inputs))
        if self.sources is not None:
            columns = zip(self.sources.tokens_RS.split(rows), self.sources.real_RS.split(rows), strict=True)
            sources = [EncoderInputs(tokens_RS=tokens, real_RS=real) for tokens, real in columns]
        parts = zip(inputs, targets, sources, strict=True)
        return [Batch(inputs_RN=i, targets_RN=t, sources=s) for i, t, s in parts]


def padded(examples: Sequence[Example]) -> Batch:
    """The examples as they are, made equally long behind their ends."""
    inputs_RN = _matrix([example.tokens[:-1] for example in examples], END)
    targets_RN = _matrix([example.tokens[1:] for example in examples], IGNORED)
    read = [example.source for example in examples if example.source is not None]
    real = [[1] * len(source) for source in read]
    sources = EncoderInputs(tokens_RS=_matrix(read, END), real_RS=_matrix(real, 0).bool()) if read else None
    return Batch(inputs_RN=inputs_RN, targets_RN=targets_RN, sources=sources)


def of_windows(windows_RN: Tensor) -> Batch:
    """Every token of a window is predicted from those before it; the first one is given."""
    return Batch(inputs_RN=windows_RN[:, :-1], targets_RN=windows_RN[:, 1:])


def spread(batches: Sequence[Batch], n_targets: float) -> Iterator[Batch]:
    """Batches from all over, as many as it takes to have about so many targets, at least one.

    The first ones alone would be of the first few texts: they were 0.12 bits per byte easier than all of them.
    """
    share = n_targets / sum(batch.n_targets for batch in batches)
    if share >= 1.0:
        return iter(batches)
    n = max(1, round(share * len(batches)))
    return (batches[i * len(batches) // n] for i in range(n))


def _matrix(rows: Sequence[list[int]], padding: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
