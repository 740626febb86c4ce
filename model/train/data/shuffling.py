"""Which windows or rows a step sees: a pure function of (seed, step), so that resuming is as if nothing happened."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model.train.data.batch import Batch, Example, padded
from model.train.data.sources import DataError
from model.train.data.token_cache import Tokens


class Shuffle:
    """An endless run of epochs, each a permutation of its own of all n things, and a phase of its own."""

    def __init__(self, n: int, *, seed: int, phases: int = 1) -> None:
        self.n, self.seed, self.phases = n, seed, phases
        self._epoch, self._phase, self._permutation = -1, 0, np.empty(0, dtype=np.int64)

    def __call__(self, place: int) -> tuple[int, int]:
        """(the epoch's phase, below `phases`; which thing) at a place of the run."""
        epoch, index = divmod(place, self.n)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._phase = epoch, int(generator.integers(self.phases))
            self._permutation = generator.permutation(self.n)
        return self._phase, int(self._permutation[index])


class StepOrder:
    """Which windows of running text."""

    def __init__(self, tokens: Tokens, *, length: int, windows: int, seed: int) -> None:
        self.tokens, self.length, self.windows, self.seed = tokens, length, windows, seed
        # One window less than fits: each epoch starts at another offset below `length`.
        self.per_epoch = (len(tokens) - 1) // length - 1
        if self.per_epoch < 1:
            most = (len(tokens) - 1) // 2
            instead = f" or --context {most} at most" if most > 1 else ""
            raise DataError(
                f"{len(tokens)} tokens of training text are too few for windows of {length} tokens: "
                f"give more text{instead}"
            )
        self._shuffle = Shuffle(self.per_epoch, seed=seed, phases=length)

    def batch(self, step: int) -> NDArray[np.int64]:
        """[windows, length + 1] token ids: inputs are [:, :-1], targets [:, 1:]."""
        starts = [self._start(step * self.windows + i) for i in range(self.windows)]
        return np.stack([self.tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)

    def _start(self, place: int) -> int:
        phase, window = self._shuffle(place)
        return phase + window * self.length


class Examples:
    """Which rows that stand by themselves."""

    def __init__(self, examples: Sequence[Example], *, rows: int, seed: int) -> None:
        self.examples, self.rows = examples, rows
        self._shuffle = Shuffle(len(examples), seed=seed)

    def batch(self, step: int) -> Batch:
        """`rows` examples."""
        places = range(step * self.rows, (step + 1) * self.rows)
        return padded([self.examples[self._shuffle(place)[1]] for place in places])
