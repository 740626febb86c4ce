"""All that a person sees of a run while it runs: a line on the terminal, log.jsonl, loss.svg. Knows no weights.

The run tells each step and each measurement; what is shown where and when is decided here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.train.console import Console
from model.train.curve import loss_curve
from model.train.extra import write_extra
from model.train.history import History
from model.train.pace import Pace
from model.train.progress import Progress, Status

_RECORDS = 1000
_CURVE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What does not change while a run goes on."""

    title: str
    """The model in a few words."""
    measured: str
    """What is measured beside the training loss: "held-out" or "training" text."""
    bytes_per_target: float
    """Of the text, on average: makes bits per byte of nats per target."""
    rates: Mapping[str, float]
    """Full learning rates, by the names that the log gives them."""
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    """Of the device in a second; None where nobody knows."""


class Report:
    """A context manager: what is drawn on a terminal is gone when it is left, however that happens.

    log.jsonl has about a thousand records, whatever the run's length, and one for each measurement:
    step, tokens, epoch, fraction (of the run, 0 to 1), seconds (those before a resume too), loss (nats a target, mean
    since the record before), bits_per_byte (the same loss, by the text's mean bytes a target), grad_norm (before
    clipping, the largest since the record before), tokens_per_second (of the last minute), mfu (null: unknown), lr
    and, with Muon, matrix_lr; held_out (bits per byte of the first held-out tokens) and held_out_whole (of all of them)
    where they were measured.
    """

    def __init__(self, out: Path, outline: Outline, *, start_step: int, report_seconds: float) -> None:
        """start_step: the step of the snapshot that the run goes on from, or 0."""
        self.outline, self.out = outline, out
        self.history = History(out / "log.jsonl", start_step=start_step)
        self.console = Console(every=report_seconds)
        self._pace = Pace()
        self._status: Status | None = None
        records = self.history.records
        self._held_out = next((r["held_out"] for r in reversed(records) if r.get("held_out")), None)
        self._mark = self._marked(records[-1]["fraction"]) if records else -1
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._drawn = time.monotonic()

    def __enter__(self) -> Report:
        self.console.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.console.__exit__()
        self.draw_curve()

    def step(self, progress: Progress) -> None:
        """One step of the optimiser is done."""
        self._pace.add(progress)
        self._losses.append(progress.loss)
        self._norms.append(progress.grad_norm)
        self._status = self._look(progress)
        if self._marked(progress.fraction) > self._mark:
            self._record(self._status)
        self.console.show(self._status)
        if time.monotonic() - self._drawn >= _CURVE_SECONDS:
            self.draw_curve()

    def held_out(self, step: int, bits: float, *, is_whole: bool = False) -> None:
        """Bits per byte were measured after `step`. is_whole: on all of the held-out text, not on a part."""
        of = "" if is_whole else " (a glance)"
        self.console.say(f"step {step}: {self.outline.measured} bits per byte {bits:.4f}{of}")
        self._held_out = bits
        measured, records = {"held_out_whole" if is_whole else "held_out": bits}, self.history.records
        if self._status is not None:
            self._status = self._look(self._status.progress)
            self._record(self._status, **measured)
            self.console.show(self._status)
        elif records and records[-1]["step"] == step:  # gone on from a snapshot of the very end
            self.history.add(records[-1] | measured)

    def draw_curve(self) -> None:
        """loss.svg as of now."""
        outline = self.outline
        picture = loss_curve(self.history.records, title=outline.title, measured=outline.measured)
        if picture is not None:
            write_extra(self.out / "loss.svg", picture)
        self._drawn = time.monotonic()

    def _look(self, progress: Progress) -> Status:
        pace, outline = self._pace, self.outline
        rate, peak = pace.tokens_per_second, outline.peak_flops
        return Status(
            progress=progress,
            loss=pace.loss,
            tokens_per_second=rate,
            mfu=rate * outline.flops_per_token / peak if peak else None,
            held_out=self._held_out,
            seconds_left=pace.seconds_left,
        )

    def _record(self, status: Status, **more: float) -> None:
        p = status.progress
        self._mark = self._marked(p.fraction)
        loss = math.fsum(self._losses) / len(self._losses) if self._losses else self.history.records[-1]["loss"]
        record: dict[str, Any] = {
            "step": p.step,
            "tokens": p.tokens,
            "epoch": round(p.epoch, 4),
            "fraction": p.fraction,
            "seconds": round(p.seconds, 3),
            "loss": loss,
            "bits_per_byte": loss / math.log(2) / self.outline.bytes_per_target,
            "grad_norm": max(self._norms, default=p.grad_norm),
            "tokens_per_second": round(status.tokens_per_second, 1),
            "mfu": status.mfu,
        }
        rates = {name: rate * p.lr_factor for name, rate in self.outline.rates.items()}
        self.history.add(record | rates | more)
        self._losses.clear()
        self._norms.clear()

    def _marked(self, fraction: float) -> int:
        return math.floor(fraction * _RECORDS)
