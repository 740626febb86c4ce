"""What one step learns from, as tensors: tokens in, tokens out, and sources where there is an encoder. Knows no files.

Shape legend: R rows, N tokens of each, S tokens of each source, M rows computed at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

IGNORED = -100
"""The target where nothing is to be learnt: padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one length, the shorter ones padded at their end. Every row starts at position 0."""

    inputs_RN: Tensor
    targets_RN: Tensor
    """What follows each input, or IGNORED."""
    source_RS: Tensor | None = None
    """What the encoder reads."""
    real_RS: Tensor | None = None
    """True for a source's tokens, False for its padding; there where source_RS is."""

    @property
    def n_targets(self) -> int:
        """Targets that count."""
        return int(self.targets_RN.ne(IGNORED).sum())

    @property
    def row_tokens(self) -> int:
        """Tokens that one row makes the network compute."""
        return self.inputs_RN.shape[1] + (0 if self.source_RS is None else self.source_RS.shape[1])

    def split(self, rows: int) -> list[Batch]:
        """The same rows, at most `rows` at once."""
        inputs, targets = self.inputs_RN.split(rows), self.targets_RN.split(rows)
        if self.source_RS is None or self.real_RS is None:
            return [Batch(inputs_RN=i, targets_RN=t) for i, t in zip(inputs, targets, strict=True)]
        parts = zip(inputs, targets, self.source_RS.split(rows), self.real_RS.split(rows), strict=True)
        return [Batch(inputs_RN=i, targets_RN=t, source_RS=s, real_RS=r) for i, t, s, r in parts]


def of_windows(windows_RN: Tensor) -> Batch:
    """Every token of a window is to be told from those before it; the first one is given."""
    return Batch(inputs_RN=windows_RN[:, :-1], targets_RN=windows_RN[:, 1:])


def up_to(batches: Iterable[Batch], n_targets: float) -> Iterator[Batch]:
    """As many of them as it takes to have so many targets."""
    seen = 0
    for batch in batches:
        if seen >= n_targets:
            return
        yield batch
        seen += batch.n_targets
