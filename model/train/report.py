"""All that a person sees of a run while it runs: a line on the terminal, log.jsonl, loss.svg. Knows no weights.

The run tells each step and each measurement; what is shown where and when is decided here.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.train.bar import Bar, blocks, find_terminal
from model.train.history import History
from model.train.pace import Pace
from model.train.progress import Progress, Status, bar_line, plain_line

_RECORDS = 1000


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
        self.outline = outline
        self.history = History(out / "log.jsonl", start_step=start_step)
        self._every, self._said = report_seconds, time.monotonic()
        self._pace = Pace()
        self._status: Status | None = None
        self._held_out = next((r["held_out"] for r in reversed(self.history.records) if r.get("held_out")), None)
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._mark = self._marked(self.history.records[-1]["fraction"]) if self.history.records else -1
        terminal = find_terminal()
        self._bar = None if terminal is None else Bar(terminal)
        self._blocks = ("#", ".") if terminal is None else blocks(terminal)
        self._is_plain = self._bar is None or not (sys.stdout and sys.stdout.isatty())

    def __enter__(self) -> Report:
        if self._bar:
            self._bar.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.__exit__()
            if self._status:
                self.say(plain_line(self._status))

    def step(self, progress: Progress) -> None:
        """One step of the optimiser is done."""
        self._pace.add(progress)
        self._losses.append(progress.loss)
        self._norms.append(progress.grad_norm)
        self._status = status = self._look(progress)
        if self._marked(progress.fraction) > self._mark:
            self._record(status)
        if self._bar:
            filled, empty = self._blocks
            self._bar.draw(lambda width: bar_line(status, width, filled=filled, empty=empty))
        now = time.monotonic()
        if self._is_plain and now - self._said >= self._every:
            self._said = now
            self.say(plain_line(status))

    def held_out(self, step: int, bits: float, *, is_whole: bool = False) -> None:
        """Bits per byte were measured after `step`. is_whole: on all of the held-out text, not on a part."""
        of = "" if is_whole else " (a glance)"
        self.say(f"step {step}: {self.outline.measured} bits per byte {bits:.4f}{of}")
        self._held_out = bits
        measured, records = {"held_out_whole" if is_whole else "held_out": bits}, self.history.records
        if self._status is not None:
            self._status = self._look(self._status.progress)
            self._record(self._status, **measured)
        elif records and records[-1]["step"] == step:  # gone on from a snapshot of the very end
            self.history.add(records[-1] | measured)

    def say(self, text: str) -> None:
        """A line of its own. Whoever read them may have gone: the run goes on."""
        with contextlib.suppress(OSError):
            print(text, flush=True)

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
