"""Which of n things comes next, epoch after epoch: a pure function of (seed, place), so that a run can go on."""

from __future__ import annotations

import numpy as np


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
