"""Findings of stages, and the report of a run, written to disk after every finding. Standard library only."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_HEAD = ("stage", "what", "value", "of the roof", "law", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of the table."""

    what: str
    value: float | str
    unit: str = ""
    share: float | None = None
    """Share of what the machine could do, by the measured roofline: 1 is all of it."""
    ok: bool | None = None
    """Whether a check holds; None if there is nothing to check."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """Arguments of a stage."""

    device: str
    """cuda, or cpu to try the script itself."""
    tiny: bool
    """Whether to use sizes that a CPU computes in moments: a smoke test, not a measurement."""
    weights: Path
    """Weights directory of the default model."""
    folder: Path
    """Folder for files of the stage; empty at its start."""
    variant: str = ""
    """Model or number format, for stages that exist once for each."""
    deadline: float = float("inf")
    """By time.monotonic(); a stage that is still running then is killed soon after."""
    numbers: Mapping[str, float] | None = None
    """Numbers of earlier stages, by `stage: what`."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def roof(self, what: str) -> float | None:
        """A peak of the machine as stage `roofs` measured it; None if it did not."""
        return (self.numbers or {}).get(f"roofs: {what}")


class Unsupported(RuntimeError):
    """This engine or machine does not support what the stage measures; not a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    status: str
    """done, failed, timed out, skipped."""
    seconds: float
    why: str = ""


@dataclass(slots=True, kw_only=True)
class Record:
    """Results of one stage. Its outcome is None while it runs."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def is_good(self) -> bool:
        """Whether the stage ended well and all checks hold. A skipped stage is no failure."""
        ended = self.outcome is not None and self.outcome.status in ("done", "skipped")
        return ended and all(finding.ok is not False for finding in self.findings)


@dataclass(slots=True, kw_only=True)
class Report:
    """Report of a run, written again whenever something is added."""

    path: Path
    """Path of the JSON file; the table is written next to it."""
    facts: Mapping[str, Any]
    records: list[Record] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether every started stage is good."""
        return all(record.is_good for record in self.records)

    @property
    def numbers(self) -> dict[str, float]:
        """Numbers for later stages, by `stage: what`."""
        found = ((f"{r.name}: {f.what}", f.value) for r in self.records for f in r.findings)
        return {name: value for name, value in found if isinstance(value, int | float)}

    def write(self) -> None:
        """Replaces both files atomically, so that an interrupted run leaves complete ones."""
        for path, text in ((self.path, self.as_json()), (self.path.with_suffix(".md"), self.table())):
            part = path.with_name(path.name + ".part")
            part.write_text(text + "\n")
            part.replace(path)

    def as_json(self) -> str:
        """The report as one line of JSON."""
        stages = [
            {
                "name": record.name,
                **(asdict(record.outcome) if record.outcome else {"status": "running"}),
                "findings": [_without_empty(asdict(finding)) for finding in record.findings],
            }
            for record in self.records
        ]
        return json.dumps({"benchmark": "gpu", **self.facts, "good": self.is_good, "stages": stages})

    def table(self) -> str:
        """The report as a Markdown table."""
        rows = [_HEAD, *(("---",) * len(_HEAD),), *(row for record in self.records for row in _rows(record))]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def file_name(device: str, date: str) -> str:
    """Base name of the report's files."""
    return f"gpu-{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-').lower() or 'none'}-{date}"


def line(name: str, finding: Finding) -> str:
    """One line of console output for a finding."""
    law = {True: "  ok", False: "  BROKEN", None: ""}[finding.ok]
    share = "" if finding.share is None else f"  {_percent(finding.share)} of the roof"
    note = f"  ({finding.note})" if finding.note else ""
    return f"{name:>16}  {finding.what}: {_number(finding.value)} {finding.unit}{share}{law}{note}"


def _rows(record: Record) -> Iterator[tuple[str, ...]]:
    for finding in record.findings:
        yield (
            record.name,
            _cell(finding.what),
            _cell(f"{_number(finding.value)} {finding.unit}".strip()),
            "" if finding.share is None else _percent(finding.share),
            {True: "holds", False: "**broken**", None: ""}[finding.ok],
            _cell(finding.note),
        )
    outcome = record.outcome
    if outcome and (outcome.status != "done" or not record.findings):
        yield (record.name, f"**{outcome.status}**", "", "", "", _cell(outcome.why))


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e7):
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 100 or value == int(value) else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != ""}
