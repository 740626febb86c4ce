"""log.jsonl: what a run told, a JSON object a line, cut back to the snapshot where a run goes on. Knows no drawing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model.files import CheckpointError, write_file
from model.train.notices import tell

Record = dict[str, Any]
"""Holds at least "step"; numbers that are not finite stand as null."""


class History:
    """The records of one run, in memory and in a file. A file that cannot be written is told once and ends no run."""

    def __init__(self, path: Path, *, start_step: int) -> None:
        """Keeps what the file has of steps up to `start_step`: later ones, and a torn line, are computed again.

        start_step: the step of the snapshot that the run goes on from; 0 begins a new run.
        """
        self.path = path
        self.records = [record for record in read_records(path) if record["step"] <= start_step] if start_step else []
        self._is_whole, self._told = False, False
        if path.exists():
            self._write()

    def add(self, record: Mapping[str, Any]) -> None:
        """One more, at the end."""
        self.records.append({key: _finite(value) for key, value in record.items()})
        self._write()

    def amend(self, more: Mapping[str, Any]) -> None:
        """Adds to the last record."""
        self.records[-1] = self.records[-1] | {key: _finite(value) for key, value in more.items()}
        self._is_whole = False
        self._write()

    def drop_from(self, step: int) -> None:
        """Forgets what was told of `step` and later."""
        kept = [record for record in self.records if record["step"] < step]
        if len(kept) < len(self.records):
            self.records, self._is_whole = kept, False

    def _write(self) -> None:
        may_append, self._is_whole = self._is_whole, False  # until the line is there
        try:
            if may_append:
                with self.path.open("ab") as file:
                    file.write(_line(self.records[-1]))
            else:
                write_file(self.path, b"".join(map(_line, self.records)))
            self._is_whole = True
        except (OSError, CheckpointError) as error:
            if not self._told:
                tell(f"warning: {self.path.name} is behind ({error}); training goes on")
            self._told = True


def read_records(path: Path) -> list[Record]:
    """All that can be read: lines that a crash left torn are passed over. Empty where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return [record for line in lines if (record := _parsed(line)) is not None]


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _line(record: Record) -> bytes:
    return (json.dumps(record, allow_nan=False) + "\n").encode()


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
