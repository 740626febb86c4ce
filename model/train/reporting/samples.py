"""samples.md: samples of the same prompts at several stages of a run, to show the progress.

The samples are also stored next to the snapshots, so that a resumed run can rewrite samples.md.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.train.common.console import write_extra
from model.train.common.sample import Sample
from model.train.reporting.metrics_log import Record, json_line, read_records
from model.train.reporting.progress import Progress

_MARKUP = re.compile(r"([\\`*_\[\]<>#|~$&])")
_MARKUP_AT_THE_START = re.compile(r"^([-+=])")
_NUMBERED = re.compile(r"^(\d+)([.)])")
STAGES = (0.01, 0.05, 0.2, 0.5)
"""Fractions of the run with samples; its end is one more."""
_MAX_TIME_SHARE = 0.01
_FIRST_SECONDS = 0.5
"""Assumed cost of the first sample, before one is measured."""


class SampleLog:
    """Samples at each stage. Sampling takes at most 1 % of the run's time: early stages are delayed or skipped."""

    def __init__(self, path: Path, store: Path, *, title: str, start_step: int) -> None:
        """path: samples.md. store: file with the stored samples. start_step: see read_records()."""
        self.path, self.store, self.title = path, store, title
        self.records = read_records(store, start_step=start_step)
        if self.records:
            self._write()
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # of another run

    def is_due(self, progress: Progress) -> bool:
        """Whether a stage is reached and the time budget allows another sample."""
        last = self.records[-1]["fraction"] if self.records else 0.0
        costs = [record["cost"] for record in self.records]
        next_cost = sum(costs) / len(costs) if costs else _FIRST_SECONDS
        reached = any(last < stage <= progress.fraction < 1.0 for stage in STAGES)
        return reached and sum(costs) + next_cost <= _MAX_TIME_SHARE * progress.seconds

    def add(self, log_record: Record, measured: Mapping[str, float], draw: Callable[[], Sequence[Sample]]) -> None:
        """Adds a stage. log_record: a record of the log. measured: bits per byte by what they are of."""
        start = time.monotonic()
        samples = draw()
        record: dict[str, Any] = {
            "step": log_record["step"],
            "tokens": log_record["tokens"],
            "fraction": log_record["fraction"],
            "cost": time.monotonic() - start,
            "bits_per_byte": dict(measured),
            "prompts": [sample.prompt for sample in samples],
            "texts": [sample.full_text for sample in samples],
        }
        # A stage that was recorded before is replaced.
        self.records = [*(earlier for earlier in self.records if earlier["step"] < log_record["step"]), record]
        self._write()

    def _write(self) -> None:
        write_extra(self.store, "".join(map(json_line, self.records)))
        write_extra(self.path, samples_page(self.records, title=self.title))


def samples_page(records: Sequence[Record], *, title: str) -> str:
    """Markdown with a table of the stages, then the samples of each prompt by stage."""
    kinds = list(dict.fromkeys(kind for record in records for kind in record["bits_per_byte"]))
    rows = [_row(_stage(r), r["step"], f"{r['tokens']:,}", *(_bits(r, kind) for kind in kinds)) for r in records]
    names = ["done", "step", "tokens", *(f"{kind} bits per byte" for kind in kinds)]
    head = [_row(*names), _row(*["---:" for _ in names])]
    parts = [
        f"# Samples of {plain(title)}",
        "The same prompts at several stages of the training, each from the same random seed; nothing is chosen.",
        "\n".join([*head, *rows]),
    ]
    for prompt in records[-1]["prompts"]:
        parts.append(f"## {plain(prompt)}")
        for record in records:
            if prompt in record["prompts"]:  # a resumed run may have others
                text = record["texts"][record["prompts"].index(prompt)]
                parts += [f"**{_stage(record)}**, step {record['step']}:", quoted(text)]
    return "\n\n".join(parts) + "\n"


def plain(line: str) -> str:
    """Escapes Markdown in one line and replaces control characters."""
    shown = visible(line.strip()).replace("\t", "\ufffd")
    return _NUMBERED.sub(r"\1\\\2", _MARKUP_AT_THE_START.sub(r"\\\1", _MARKUP.sub(r"\\\1", shown)))


def visible(text: str) -> str:
    """Replaces control characters except tabs and line ends: printed, they would control the terminal."""
    return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text)


def quoted(text: str) -> str:
    """The text as a Markdown quotation that preserves line breaks."""
    lines = [plain(line) for line in text.strip("\n").split("\n")]
    return "\n".join(f"> {line}  " if line else ">" for line in lines)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _stage(record: Record) -> str:
    return f"{100 * record['fraction']:.3g} %"


def _bits(record: Record, kind: str) -> str:
    bits = record["bits_per_byte"].get(kind)
    return "" if bits is None else f"{bits:.4f}"
