"""samples.md: the same prompts at several stages of a run, so that one sees the text getting better.

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
"""Shares of the run; its end is one more."""
_MOST_TIME = 0.01
_FIRST_SECONDS = 0.5
"""Assumed cost of the first sample, before one is measured."""


class Gallery:
    """Drawing costs a hundredth of the run's time at most: stages that come too early for that come later, or not."""

    def __init__(self, path: Path, store: Path, *, title: str, start_step: int) -> None:
        """path: of samples.md. store: of what it is written from. start_step: as in read_records()."""
        self.path, self.store, self.title = path, store, title
        self.records = read_records(store, start_step=start_step)
        if self.records:
            self._write()
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # of another run

    def is_due(self, progress: Progress) -> bool:
        """Whether a stage is reached and may cost what the others did."""
        last = self.records[-1]["fraction"] if self.records else 0.0
        costs = [record["cost"] for record in self.records]
        next_cost = sum(costs) / len(costs) if costs else _FIRST_SECONDS
        reached = any(last < stage <= progress.fraction < 1.0 for stage in STAGES)
        return reached and sum(costs) + next_cost <= _MOST_TIME * progress.seconds

    def add(self, told: Record, measured: Mapping[str, float], draw: Callable[[], Sequence[Sample]]) -> None:
        """Adds a stage. told: a record of the log. measured: bits per byte by what they are of."""
        began = time.monotonic()
        samples = draw()
        record: dict[str, Any] = {
            "step": told["step"],
            "tokens": told["tokens"],
            "fraction": told["fraction"],
            "cost": time.monotonic() - began,
            "bits_per_byte": dict(measured),
            "prompts": [sample.prompt for sample in samples],
            "texts": [sample.joined for sample in samples],
        }
        # A stage that was recorded before is replaced.
        self.records = [*(earlier for earlier in self.records if earlier["step"] < told["step"]), record]
        self._write()

    def _write(self) -> None:
        write_extra(self.store, "".join(map(json_line, self.records)))
        write_extra(self.path, gallery_page(self.records, title=self.title))


def gallery_page(records: Sequence[Record], *, title: str) -> str:
    """Markdown: a table of the stages, then under each prompt what came of it at each of them."""
    kinds = list(dict.fromkeys(kind for record in records for kind in record["bits_per_byte"]))
    rows = [_row(_stage(r), r["step"], f"{r['tokens']:,}", *(_bits(r, kind) for kind in kinds)) for r in records]
    names = ["done", "step", "tokens", *(f"{kind} bits per byte" for kind in kinds)]
    head = [_row(*names), _row(*["---:" for _ in names])]
    parts = [
        f"# Samples of {plain(title)}",
        "The same prompts at several stages of the training, each from the same random seed; nothing is chosen.",
        "\n".join([*head, *rows]),
    ]
    for number, prompt in enumerate(records[-1]["prompts"]):
        parts.append(f"## {plain(prompt)}")
        for record in records:
            parts += [f"**{_stage(record)}**, step {record['step']}:", quoted(record["texts"][number])]
    return "\n\n".join(parts) + "\n"


def plain(line: str) -> str:
    """One line without what Markdown would take for markup, and without control characters."""
    shown = visible(line.strip()).replace("\t", "\ufffd")
    return _NUMBERED.sub(r"\1\\\2", _MARKUP_AT_THE_START.sub(r"\\\1", _MARKUP.sub(r"\\\1", shown)))


def visible(text: str) -> str:
    """The text without control characters but tabs and line ends: printed, they would command the terminal."""
    return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text)


def quoted(text: str) -> str:
    """The text as a quotation, in which its lines stay lines."""
    lines = [plain(line) for line in text.strip("\n").split("\n")]
    return "\n".join(f"> {line}  " if line else ">" for line in lines)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _stage(record: Record) -> str:
    return f"{100 * record['fraction']:.3g} %"


def _bits(record: Record, kind: str) -> str:
    bits = record["bits_per_byte"].get(kind)
    return "" if bits is None else f"{bits:.4f}"
