"""The records of log.jsonl: when there is one, and what it says of the steps since the one before. Knows no terminal.

About a thousand records, whatever the run's length, and one where something was measured. Their keys:
step, tokens, epoch, fraction (of the run, 0 to 1), seconds (those before a resume too), loss (nats a target, the mean
since the record before), bits_per_byte (the same loss, by the text's mean bytes a target), grad_norm (before clipping,
the largest since the record before), tokens_per_second (of the last minute), mfu (null: not known), lr and,
with Muon, matrix_lr; where they were measured, held_out (bits per byte of held-out tokens from all over) and
held_out_whole (of all of them). Where a run begins from weights, step 0 has only what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.train.report.board import Board
from model.train.report.history import History, Record
from model.train.report.progress import Outline, Status

_RECORDS = 1000


class Journal:
    """What each step tells, as records."""

    def __init__(self, path: Path, outline: Outline, *, start_step: int, board: Board | None) -> None:
        """start_step: as in History. board: is told whatever the log is."""
        self.history = History(path, start_step=start_step)
        self._outline, self._board = outline, board
        records = self.history.records
        self._mark = _mark(records[-1]["fraction"]) if records and records[-1]["step"] else -1
        self._losses: list[float] = []
        self._norms: list[float] = []

    @property
    def records(self) -> list[Record]:
        """All so far."""
        return self.history.records

    def newest(self, key: str) -> float | None:
        """The last value of what is not in every record."""
        return next((r[key] for r in reversed(self.records) if r.get(key) is not None), None)

    def step(self, status: Status) -> None:
        """One more step."""
        self._losses.append(status.progress.loss)
        self._norms.append(status.progress.grad_norm)
        if _mark(status.progress.fraction) > self._mark:
            self._record(status)

    def measure(self, status: Status, measured: Mapping[str, float]) -> None:
        """What was measured after the last step, which gets a record where it has none."""
        if self._losses:
            self._record(status)
        self.end(measured)

    def begin(self, measured: Mapping[str, float]) -> None:
        """What was measured before the first step."""
        self.history.add({"step": 0, "tokens": 0, "epoch": 0.0, "fraction": 0.0, "seconds": 0.0, **measured})
        self._tell_board(self.records[-1])

    def end(self, measured: Mapping[str, float]) -> None:
        """What was measured after the last step of all, which has a record."""
        self.history.amend(measured)
        self._tell_board({"step": self.records[-1]["step"], **measured})

    def _record(self, status: Status) -> None:
        p, loss = status.progress, math.fsum(self._losses) / len(self._losses)
        record = {
            "step": p.step,
            "tokens": p.tokens,
            "epoch": round(p.epoch, 4),
            "fraction": p.fraction,
            "seconds": round(p.seconds, 3),
            "loss": loss,
            "bits_per_byte": loss / math.log(2) / self._outline.bytes_per_target,
            "grad_norm": max(self._norms),
            "tokens_per_second": round(status.tokens_per_second, 1),
            "mfu": status.mfu,
        }
        rates = {name: rate * p.lr_factor for name, rate in self._outline.rates.items()}
        self.history.add(record | rates)
        self._tell_board(record | rates)
        self._mark = _mark(p.fraction)
        self._losses.clear()
        self._norms.clear()

    def _tell_board(self, record: Mapping[str, Any]) -> None:
        if self._board:
            self._board.add(record)


def _mark(fraction: float) -> int:
    return math.floor(fraction * _RECORDS)
