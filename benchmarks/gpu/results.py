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
    is_blocking: bool = False
    """Whether every launch waits for its kernel, so that an error of CUDA appears where it was made."""
    numbers: Mapping[str, float] | None = None
    """Numbers of earlier stages, by `stage: what`."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def roof(self, what: str) -> float | None:
        """A peak that stage `roofs` measured in this run; None on a CPU, where a share of tiny sizes means nothing."""
        return (self.numbers or {}).get(f"roofs: {what}") if self.device == "cuda" else None


class Unsupported(RuntimeError):
    """This engine or machine does not support what the stage measures; not a failure."""


@dataclass(slots=True, kw_only=True)
class Record:
    """Results of one stage."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    status: str = "running"
    """running, done, failed, timed out, skipped."""
    seconds: float = 0.0
    why: str = ""

    @property
    def is_device_error(self) -> bool:
        """Whether CUDA, or a signal, ended the stage."""
        return self.status == "failed" and bool(re.search(r"CUDA (driver )?error|killed by SIG|cudaError", self.why))

    @property
    def is_good(self) -> bool:
        """Whether the stage ended well and all checks hold. A skipped stage is no failure."""
        return self.status in ("done", "skipped") and all(finding.ok is not False for finding in self.findings)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Rows of the table."""
        for finding in self.findings:
            law = {True: "holds", False: "**broken**", None: ""}[finding.ok]
            value = f"{_number(finding.value)} {finding.unit}".strip()
            yield self.name, finding.what, value, _percent(finding.share), law, finding.note
        if self.status not in ("running", "done") or not self.findings:
            yield self.name, f"**{self.status}**", "", "", "", self.why


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
        stages = [asdict(record) for record in self.records]
        for stage in stages:
            stage["findings"] = [_without_empty(finding) for finding in stage["findings"]]
        return json.dumps({"benchmark": "gpu", **self.facts, "good": self.is_good, "stages": stages})

    def table(self) -> str:
        """The report as a Markdown table."""
        rows = [_HEAD, *(("---",) * len(_HEAD),), *(row for record in self.records for row in record.rows())]
        cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
        return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def file_name(device: str, date: str) -> str:
    """Base name of the report's files."""
    return f"gpu-{re.sub(r'[^A-Za-z0-9]+', '-', device).strip('-').lower() or 'none'}-{date}"


def shortened(text: str, size: int = 500) -> str:
    """In one line, with both ends: an error's start has the cause, and its end the place."""
    text = " ".join(text.split())
    return text if len(text) <= size else f"{text[: size // 2]} ... {text[-size // 2 :]}"


def line(name: str, finding: Finding) -> str:
    """One line of console output for a finding."""
    law = {True: "  ok", False: "  BROKEN", None: ""}[finding.ok]
    share = f"  {_percent(finding.share)} of the roof" if finding.share is not None else ""
    note = f"  ({finding.note})" if finding.note else ""
    return f"{name:>16}  {finding.what}: {_number(finding.value)} {finding.unit}{share}{law}{note}"


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e7):
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 100 or value == int(value) else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != ""}
