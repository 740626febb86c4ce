"""log.jsonl with one JSON object per record, truncated to the snapshot when a run resumes; TensorBoard if installed.

About a thousand records, whatever the run's length, plus one per evaluation; docs/train-log.md documents the keys. In a
fine-tuning run, step 0 has only the evaluation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from model.files import CheckpointError, write_file
from model.train.reporting.console import print_stderr
from model.train.reporting.progress import Progress, RateTracker, RunInfo

_NOT_PLOTTED = ("step", "fraction")
_RECORDS = 1000
Record = dict[str, Any]
"""Has at least the key "step"; numbers that are not finite are null."""


def tensorboard_writer() -> Any:
    """The class that writes event files for tensorboard --logdir DIR. Raises ValueError if it is not installed."""
    try:  # not at module level: optional, and slow to import
        return import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        raise ValueError(
            "--tensorboard: the package tensorboard is not installed; install it (pip install tensorboard) or "
            "omit the flag, log.jsonl and loss.svg are written anyway"
        ) from None


class MetricsLog:
    """Records of each step in memory and in a file; a failed write is reported once and does not end the run."""

    def __init__(self, path: Path, run_info: RunInfo, *, start_step: int, tensorboard: Any = None) -> None:
        """start_step: see read_records(). tensorboard: tensorboard_writer(), to write the same there."""
        self.path, self._run_info = path, run_info
        # Records of later steps are removed, which a resumed run computes again.
        folder = str(path.parent / "tensorboard")
        self._tensorboard = tensorboard(folder, purge_step=start_step + 1) if tensorboard else None
        self.records = read_records(path, start_step=start_step)
        self._mark = _mark(self.records[-1]["fraction"]) if self.records and self.records[-1]["step"] else -1
        self._steps: list[Progress] = []
        """Steps since the last record."""
        self._can_append, self._has_warned = False, False
        if path.exists():
            self._write()

    def step(self, progress: Progress, rates: RateTracker) -> None:
        """Adds a step; writes a record when due."""
        self._steps.append(progress)
        if _mark(progress.fraction) > self._mark:
            self._record(rates)

    def measure(self, measured: Mapping[str, Any], rates: RateTracker) -> None:
        """Adds an evaluation or samples to the record of the last step, or of step 0; creates the record if needed."""
        if self._steps:
            self._record(rates)
        elif not self.records:
            self.add({"step": 0, "tokens": 0, "epoch": 0.0, "fraction": 0.0, "seconds": 0.0})
        added = {key: _finite(value) for key, value in measured.items()}
        self.records[-1] |= added
        self._can_append = False
        self._write()
        self._log_to_tensorboard({"step": self.records[-1]["step"], **added})

    def add(self, record: Mapping[str, Any]) -> None:
        """Appends a record."""
        self.records.append({key: _finite(value) for key, value in record.items()})
        self._write()
        self._log_to_tensorboard(self.records[-1])

    def _record(self, rates: RateTracker) -> None:
        p, loss = self._steps[-1], math.fsum(step.loss for step in self._steps) / len(self._steps)
        record = {
            "step": p.step,
            "tokens": p.tokens,
            "epoch": round(p.epoch, 4),
            "fraction": p.fraction,
            "seconds": round(p.seconds, 3),
            "loss": loss,
            "bits_per_byte": loss / math.log(2) / self._run_info.bytes_per_target,
            "grad_norm": max(step.grad_norm for step in self._steps),
            "tokens_per_second": round(rates.tokens_per_second, 1),
            "mfu": rates.mfu,
        }
        self.add(record | {name: rate * p.lr_factor for name, rate in self._run_info.rates.items()})
        self._mark = _mark(p.fraction)
        self._steps.clear()

    def _log_to_tensorboard(self, record: Mapping[str, Any]) -> None:
        if self._tensorboard:
            for key, value in record.items():
                if key not in _NOT_PLOTTED and isinstance(value, int | float):
                    self._tensorboard.add_scalar(key, value, record["step"])
            self._tensorboard.flush()

    def _write(self) -> None:
        may_append, self._can_append = self._can_append, False  # until the line is written
        try:
            if may_append:
                with self.path.open("ab") as file:
                    file.write(_json_line(self.records[-1]).encode())
            else:
                write_file(self.path, "".join(map(_json_line, self.records)).encode())
            self._can_append = True
        except (OSError, CheckpointError) as error:
            if not self._has_warned:
                print_stderr(f"warning: {self.path.name} is out of date ({error}); training continues")
            self._has_warned = True


def read_records(path: Path, *, start_step: int) -> list[Record]:
    """Records of a file up to `start_step`; empty without a file. Drops lines that a crash left incomplete.

    start_step: step of the snapshot that the run resumes from; 0 for a new run.
    """
    records = []
    for line in path.read_bytes().splitlines() if start_step and path.is_file() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= start_step:
            records.append(record)
    return records


def _json_line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mark(fraction: float) -> int:
    return math.floor(fraction * _RECORDS)
