"""The report of a run: a table and JSON, written to disk after every stage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.apart import Outcome
from benchmarks.gpu.finding import Finding

_HEAD = ("stage", "what", "value", "of the roof", "law", "note")


@dataclass(slots=True, kw_only=True)
class Record:
    """One stage. Owned by the report; its outcome is None while it runs."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    outcome: Outcome | None = None

    @property
    def is_good(self) -> bool:
        """Nothing failed, and no law was broken. What could not be asked is no failure."""
        ended = self.outcome is not None and self.outcome.status in ("done", "skipped")
        return ended and all(finding.ok is not False for finding in self.findings)


@dataclass(slots=True, kw_only=True)
class Report:
    """Mutable, owned by the run; written again whenever something is added."""

    path: Path
    """Path of the JSON file; the table is written next to it."""
    facts: Mapping[str, Any]
    records: list[Record] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether every stage that was begun is."""
        return all(record.is_good for record in self.records)

    @property
    def numbers(self) -> dict[str, float]:
        """What later stages may ask for, by `stage: what`."""
        found = ((f"{r.name}: {f.what}", f.value) for r in self.records for f in r.findings)
        return {name: value for name, value in found if isinstance(value, int | float)}

    def write(self) -> None:
        """A cut run leaves what it had found: never half a file."""
        for path, text in ((self.path, self.as_json()), (self.path.with_suffix(".md"), self.table())):
            part = path.with_name(path.name + ".part")
            part.write_text(text + "\n")
            part.replace(path)

    def as_json(self) -> str:
        """One line."""
        stages = [
            {
                "name": record.name,
                **(asdict(record.outcome) if record.outcome else {"status": "running"}),
                "findings": [_without_nothing(asdict(finding)) for finding in record.findings],
            }
            for record in self.records
        ]
        return json.dumps({"benchmark": "gpu", **self.facts, "good": self.is_good, "stages": stages})

    def table(self) -> str:
        """Markdown."""
        rows = [_HEAD, *(("---",) * len(_HEAD),), *(row for record in self.records for row in _rows(record))]
        return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def file_name(device: str, date: str) -> str:
    """Without an ending, in letters, digits, dots and dashes."""
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


def _without_nothing(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != ""}
