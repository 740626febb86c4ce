"""log.jsonl, one JSON object a record, cut back to the snapshot when a run resumes; TensorBoard where installed.

About a thousand records, whatever the run's length, and one where something was measured; docs/train-log.md says what
each key means. Where a run begins from weights, step 0 has only what was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from model.files import CheckpointError, write_file
from model.train.common.console import tell
from model.train.data.sources import DataError
from model.train.reporting.progress import Outline, Status

_NOT_DRAWN = ("step", "fraction")


class TensorBoardLog:
    """Writes event files below a folder. Shown by: tensorboard --logdir DIR."""

    def __init__(self, folder: Path) -> None:
        """Raises DataError where TensorBoard is not installed."""
        try:  # not at the top: it is optional, and slow to import
            self._writer_class: Any = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise DataError(
                "--tensorboard: the package tensorboard is not installed; install it (pip install tensorboard) or "
                "leave the flag out, log.jsonl and loss.svg are written anyway"
            ) from None
        self._folder = folder

    def start(self, step: int) -> None:
        """Removes records of later steps, which a resumed run computes again."""
        self._writer = self._writer_class(str(self._folder), purge_step=step + 1)

    def add(self, record: Mapping[str, Any]) -> None:
        """One record of the log, or a part of it; after start()."""
        for key, value in record.items():
            if key not in _NOT_DRAWN and value is not None:
                self._writer.add_scalar(key, value, record["step"])
        self._writer.flush()


Record = dict[str, Any]
"""Holds at least "step"; numbers that are not finite stand as null."""
_RECORDS = 1000


class MetricsLog:
    """Records of each step in memory and in a file; a failed write is reported once and does not end the run."""

    def __init__(self, path: Path, outline: Outline, *, start_step: int, board: TensorBoardLog | None) -> None:
        """start_step: as in read_records(). board: receives the same records."""
        self.path, self.board, self._outline = path, board, outline
        self.records = read_records(path, start_step=start_step)
        self._mark = _mark(self.records[-1]["fraction"]) if self.records and self.records[-1]["step"] else -1
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._is_whole, self._told = False, False
        if path.exists():
            self._write()

    def step(self, status: Status) -> None:
        """One more step."""
        self._losses.append(status.progress.loss)
        self._norms.append(status.progress.grad_norm)
        if _mark(status.progress.fraction) > self._mark:
            self._record(status)

    def measure(self, status: Status | None, measured: Mapping[str, float]) -> None:
        """What was measured after the last step, which gets a record where it has none, or before the first one."""
        if status and self._losses:
            self._record(status)
        elif not self.records:
            self.add({"step": 0, "tokens": 0, "epoch": 0.0, "fraction": 0.0, "seconds": 0.0})
        added = {key: _finite(value) for key, value in measured.items()}
        self.records[-1] |= added
        self._is_whole = False
        self._write()
        self._tell_board({"step": self.records[-1]["step"], **added})

    def add(self, record: Mapping[str, Any]) -> None:
        """One more record, at the end."""
        self.records.append({key: _finite(value) for key, value in record.items()})
        self._write()
        self._tell_board(self.records[-1])

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
        self.add(record | {name: rate * p.lr_factor for name, rate in self._outline.rates.items()})
        self._mark = _mark(p.fraction)
        self._losses.clear()
        self._norms.clear()

    def _tell_board(self, record: Record) -> None:
        if self.board:
            self.board.add(record)

    def _write(self) -> None:
        may_append, self._is_whole = self._is_whole, False  # until the line is there
        try:
            if may_append:
                with self.path.open("ab") as file:
                    file.write(json_line(self.records[-1]).encode())
            else:
                write_file(self.path, "".join(map(json_line, self.records)).encode())
            self._is_whole = True
        except (OSError, CheckpointError) as error:
            if not self._told:
                tell(f"warning: {self.path.name} is behind ({error}); training goes on")
            self._told = True


def read_records(path: Path, *, start_step: int) -> list[Record]:
    """What a file has of steps up to `start_step`: later ones, and lines that a crash left torn, are computed again.

    start_step: the step of the snapshot that a run goes on from; 0 begins a new run. Empty where there is no file.
    """
    try:
        lines = path.read_bytes().splitlines() if start_step else []
    except OSError:
        return []
    return [record for line in lines if (record := _parsed(line)) is not None and record["step"] <= start_step]


def json_line(record: Record) -> str:
    """As it stands in a file."""
    return json.dumps(record, allow_nan=False) + "\n"


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mark(fraction: float) -> int:
    return math.floor(fraction * _RECORDS)
