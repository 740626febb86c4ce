"""Reports a run to the user: progress, log.jsonl, loss.svg, samples.md.

The run passes in each step and each measurement; this module decides what is shown where and when.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from model.train.reporting.console import print_stdout, write_extra
from model.train.reporting.loss_plot import loss_curve
from model.train.reporting.metrics_log import MetricsLog
from model.train.reporting.progress import Progress, RateTracker, RunInfo, progress_line
from model.train.reporting.progress_display import ProgressDisplay
from model.train.reporting.samples import Sample, samples_page

_CURVE_SECONDS = 30.0
STAGES = (0.01, 0.05, 0.2, 0.5)
"""Fractions of the run with samples; its end is one more."""
_MAX_SAMPLE_SHARE = 0.01
_FIRST_SAMPLE_SECONDS = 0.5
"""Assumed cost of the first samples, before any are measured."""


class Report:
    """Context manager that reports a run to console, files and TensorBoard; erases the progress bar on exit."""

    def __init__(
        self, out: Path, run_info: RunInfo, *, start_step: int, report_seconds: float, tensorboard: Any = None
    ) -> None:
        """start_step: step of the snapshot that the run resumes from, or 0. tensorboard: see MetricsLog."""
        self.run_info = run_info
        self._curve = out / "loss.svg"
        self._metrics_log = MetricsLog(out / "log.jsonl", run_info, start_step=start_step, tensorboard=tensorboard)
        self._samples = out / "samples.md"
        self._write_samples()
        self._sample_seconds = _FIRST_SAMPLE_SECONDS
        self._display, self._rates = ProgressDisplay(every=report_seconds), RateTracker(run_info)
        self._held_out = next((r["held_out"] for r in reversed(self._metrics_log.records) if r.get("held_out")), None)
        self._progress: Progress | None = None
        self._last_drawn = time.monotonic()

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._display.close(progress_line(self._progress, self._rates, self._held_out))
        self._draw_curve()

    def step(self, progress: Progress) -> None:
        """Reports a completed step."""
        self._progress = progress
        self._rates.add(progress)
        self._metrics_log.step(progress, self._rates)
        self._display.show(progress_line(progress, self._rates, self._held_out), progress.fraction)
        if time.monotonic() - self._last_drawn >= _CURVE_SECONDS:
            self._draw_curve()

    def held_out(self, step: int, bits: float) -> None:
        """Reports bits per byte of a part of the held-out text after `step`, the last reported step or 0."""
        print_stdout(f"step {step}: {self.run_info.measured} bits per byte {bits:.4f} (subset)")
        self._held_out = bits
        self._metrics_log.measure({"held_out": bits}, self._rates)

    def sample(self, draw: Callable[[], Sequence[Sample]]) -> None:
        """Generates samples if a stage is reached and takes at most 1 % of the time so far; call after each step."""
        p, records = self._progress, self._metrics_log.records
        if p is None or self._sample_seconds > _MAX_SAMPLE_SHARE * p.seconds:
            return
        last = max((record["fraction"] for record in records if "samples" in record), default=0.0)
        if any(last < stage <= p.fraction < 1.0 for stage in STAGES):
            start = time.monotonic()
            samples = draw()
            self._sample_seconds = time.monotonic() - start
            self._metrics_log.measure({"samples": {s.prompt: s.full_text for s in samples}}, self._rates)
            self._write_samples()

    def finish(self, bits: float, samples: Sequence[Sample]) -> None:
        """Reports the final result. bits: bits per byte on all of the held-out text."""
        if self._metrics_log.records:
            texts = {sample.prompt: sample.full_text for sample in samples}
            self._metrics_log.measure({"held_out_whole": bits, "samples": texts}, self._rates)
            self._write_samples()
            self._draw_curve()

    def _write_samples(self) -> None:
        """Writes samples.md, or removes another run's."""
        records, info = self._metrics_log.records, self.run_info
        if any("samples" in record for record in records):
            write_extra(self._samples, samples_page(records, title=info.title, measured=info.measured))
        else:
            with contextlib.suppress(OSError):
                self._samples.unlink(missing_ok=True)

    def _draw_curve(self) -> None:
        picture = loss_curve(self._metrics_log.records, title=self.run_info.title, measured=self.run_info.measured)
        if picture is not None:
            write_extra(self._curve, picture)
        self._last_drawn = time.monotonic()
