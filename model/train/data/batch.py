"""Training batches: which windows or rows a step sees, as tensors of inputs, targets, and sources for an encoder.

The order is a pure function of (seed, step), so that a resumed run sees the same batches. Windows of running text have
equal length; independent rows are padded at their ends. Shape legend: R rows, N tokens of each, S tokens of each
source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.train.data.sources import DataError
from model.train.data.token_cache import Tokens
from model.train.data.vocabulary import END

IGNORE_INDEX = -100
"""Target of padding, which the loss ignores."""


class Shuffle:
    """Endless sequence of epochs, each with its own permutation of n items and its own phase."""

    def __init__(self, n: int, *, seed: int, phases: int = 1) -> None:
        self.n, self.seed, self.phases = n, seed, phases
        self._epoch, self._phase, self._permutation = -1, 0, np.empty(0, dtype=np.int64)

    def __call__(self, position: int) -> tuple[int, int]:
        """(phase of the epoch, below `phases`; index of the item) at a position of the sequence."""
        epoch, index = divmod(position, self.n)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._phase = epoch, int(generator.integers(self.phases))
            self._permutation = generator.permutation(self.n)
        return self._phase, int(self._permutation[index])


class StepOrder:
    """Selects the windows of running text of each step."""

    def __init__(self, tokens: Tokens, *, length: int, windows: int, seed: int) -> None:
        self.tokens, self.length, self.windows = tokens, length, windows
        # One window less than fits: each epoch starts at a different offset below `length`.
        self.per_epoch = (len(tokens) - 1) // length - 1
        if self.per_epoch < 1:
            max_length = (len(tokens) - 1) // 2
            instead = f" or --context {max_length} at most" if max_length > 1 else ""
            raise DataError(
                f"{len(tokens)} tokens of training text are too few for windows of {length} tokens: "
                f"give more text{instead}"
            )
        self._shuffle = Shuffle(self.per_epoch, seed=seed, phases=length)

    def batch(self, step: int) -> NDArray[np.int64]:
        """[windows, length + 1] token ids: inputs are [:, :-1], targets [:, 1:]."""
        chosen = [self._shuffle(step * self.windows + i) for i in range(self.windows)]
        starts = [phase + window * self.length for phase, window in chosen]
        return np.stack([self.tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Example:
    """One row: every token but the first is a target."""

    tokens: list[int]
    source: list[int] | None = None
    """Input of the encoder; either all examples of a run have one, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInputs:
    """Sources of a batch."""

    tokens_RS: Tensor
    real_RS: Tensor
    """True for a source's tokens, False for its padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one length, the shorter ones padded at their end. Every row starts at position 0."""

    inputs_RN: Tensor
    targets_RN: Tensor
    """Next token of each input, or IGNORE_INDEX."""
    sources: EncoderInputs | None = None

    @property
    def n_targets(self) -> int:
        """Number of targets that are not ignored."""
        return int(self.targets_RN.ne(IGNORE_INDEX).sum())

    @property
    def row_tokens(self) -> int:
        """Tokens that the network computes for one row."""
        return self.inputs_RN.shape[1] + (0 if self.sources is None else self.sources.tokens_RS.shape[1])

    def to(self, device: torch.device) -> Batch:
        """The same rows on a device; the copy does not wait for it."""
        if device.type == "cpu":
            return self

        def copy(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)  # from other memory a copy is a synchronization

        sources = self.sources and EncoderInputs(
            tokens_RS=copy(self.sources.tokens_RS), real_RS=copy(self.sources.real_RS)
        )
        return Batch(inputs_RN=copy(self.inputs_RN), targets_RN=copy(self.targets_RN), sources=sources)

    def split(self, rows: int) -> list[Batch]:
        """The same rows, in batches of at most `rows`."""
        inputs, targets = self.inputs_RN.split(rows), self.targets_RN.split(rows)
        if self.sources is None:
            return [Batch(inputs_RN=i, targets_RN=t) for i, t in zip(inputs, targets, strict=True)]
        tokens, real = self.sources.tokens_RS.split(rows), self.sources.real_RS.split(rows)
        return [
            Batch(inputs_RN=i, targets_RN=t, sources=EncoderInputs(tokens_RS=s, real_RS=r))
            for i, t, s, r in zip(inputs, targets, tokens, real, strict=True)
        ]


def pad_batch(examples: Sequence[Example]) -> Batch:
    """A batch of the examples, padded at their ends to equal length."""
    inputs_RN = _matrix([example.tokens[:-1] for example in examples], END)
    targets_RN = _matrix([example.tokens[1:] for example in examples], IGNORE_INDEX)
    ids = [example.source for example in examples if example.source is not None]
    real = [[1] * len(source) for source in ids]
    sources = EncoderInputs(tokens_RS=_matrix(ids, END), real_RS=_matrix(real, 0).bool()) if ids else None
    return Batch(inputs_RN=inputs_RN, targets_RN=targets_RN, sources=sources)


def shuffled_batches(examples: Sequence[Example], *, rows: int, seed: int) -> Callable[[int], Batch]:
    """The batch of `rows` examples of each step."""
    shuffle = Shuffle(len(examples), seed=seed)
    return lambda step: pad_batch([examples[shuffle(step * rows + i)[1]] for i in range(rows)])


def batch_of_windows(windows_RN: Tensor) -> Batch:
    """A batch in which every token of a window but the first is a target."""
    return Batch(inputs_RN=windows_RN[:, :-1], targets_RN=windows_RN[:, 1:])


def evenly_spaced(batches: Sequence[Batch], n_targets: float) -> Iterator[Batch]:
    """Evenly spaced batches with about `n_targets` targets in total, at least one batch.

    The first batches alone would cover only the first few texts, which were 0.12 bits per byte easier than all.
    """
    share = n_targets / sum(batch.n_targets for batch in batches)
    if share >= 1.0:
        return iter(batches)
    n = max(1, round(share * len(batches)))
    return (batches[i * len(batches) // n] for i in range(n))


def _matrix(rows: Sequence[list[int]], padding: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
