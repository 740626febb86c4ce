"""A run whose numbers are no numbers any more, and what to do about it. Knows no tensors."""

from __future__ import annotations

from pathlib import Path

from model.train.snapshot import newest_snapshot


class Diverged(RuntimeError):
    """The loss, its gradient or the weights are not finite. The weights were not saved."""

    def __init__(self, what: str, folder: Path) -> None:
        """folder: of the snapshots."""
        good = newest_snapshot(folder)
        stands = f"the last good snapshot is {good}" if good else "there was no snapshot yet"
        super().__init__(
            f"{what}; {stands}. Start anew with --overwrite and half of --lr and --matrix-lr, or a longer --warm-up"
        )
