"""Reports a run to the user: opening and closing summary, console, log.jsonl, loss.svg, samples.md.

The run passes in each step and each measurement; this module decides what is shown where and when.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from model.checkpoint.model_summary import describe_size, shape_lines
from model.config import ModelConfig
from model.train.common.console import duration, format_count, print_stdout, program_command, write_extra
from model.train.common.sample import Sample
from model.train.reporting.loss_plot import loss_curve
from model.train.reporting.metrics_log import MetricsLog
from model.train.reporting.model_card import RunFacts
from model.train.reporting.progress import Console, Progress, RateTracker, RunInfo, Status
from model.train.reporting.samples import SampleLog
from model.train.setup.dataset import Dataset
from model.train.step.schedule import Limits


def opening_summary(
    config: ModelConfig, n_params: int, dataset: Dataset, limits: Limits, *, machine: str, step: int
) -> str:
    """Summary at the start. machine: description of device and dtype. step: first step, above 0 if resumed."""
    shape = dict(shape_lines(config))["shape"]
    lines = [
        f"model: {describe_size(n_params)} parameters ({shape}, vocabulary {config.vocab_size}) on {machine}",
        f"data:  {dataset.corpus}",
        f"plan:  {_plan(dataset, limits)}" + (f"; goes on at step {step}" if step else ""),
    ]
    return "\n".join(lines)


def closing_summary(out: Path, facts: RunFacts) -> str:
    """Summary at the end; the last line is a command to serve the model."""
    trained = f"after {facts.steps} steps, {duration(facts.seconds)}"
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    lines = [
        f"{facts.measured} bits per byte {facts.bits_per_byte:.4f} {trained}",
        *(f"unseen {name}: {bits:.4f} bits per byte" for name, bits in facts.unseen.items()),
        f"written: {shlex.quote(str(out))} ({size / 1e6:.1f} MB); look at loss.svg, samples.md and README.md in it",
        f"serve it: {serve_command(out)}",
    ]
    return "\n".join(lines)


def serve_command(out: Path) -> str:
    """Command that serves a weights directory."""
    return shlex.join([*program_command("serve"), "--weights", str(out)])


def _plan(dataset: Dataset, limits: Limits) -> str:
    per_step = dataset.tokens(1)
    batch = f"{dataset.rows} rows, about {per_step:,} tokens a step"
    share = limits.done(step=1, epochs=dataset.rows / dataset.per_epoch, tokens=per_step, seconds=0.0)
    until = [] if limits.minutes is None else [f"{limits.minutes:g} minutes"]
    if share:
        most = max(1, round(1 / share))
        until.append(f"{most:,} steps, {format_count(dataset.tokens(most))} tokens, {dataset.epochs(most):.2f} epochs")
    return f"{' or '.join(until)}; {batch}"


_CURVE_SECONDS = 30.0


class Report:
    """Context manager that reports a run to console, files and TensorBoard; erases the progress bar on exit."""

    def __init__(
        self,
        out: Path,
        run_info: RunInfo,
        *,
        start_step: int,
        report_seconds: float,
        tensorboard: Any = None,
    ) -> None:
        """start_step: step of the snapshot that the run resumes from, or 0. tensorboard: see MetricsLog."""
        self.run_info = run_info
        self._curve = out / "loss.svg"
        self._metrics_log = MetricsLog(out / "log.jsonl", run_info, start_step=start_step, tensorboard=tensorboard)
        store = out / ".training" / "samples.jsonl"
        self._sample_log = SampleLog(out / "samples.md", store, title=run_info.title, start_step=start_step)
        self._console, self._rates = Console(every=report_seconds), RateTracker()
        self._held_out = next((r["held_out"] for r in reversed(self._metrics_log.records) if r.get("held_out")), None)
        self._status: Status | None = None
        self._last_drawn = time.monotonic()

    def __enter__(self) -> Report:
        self._console.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._console.__exit__()
        self._draw_curve()

    def step(self, progress: Progress) -> None:
        """Reports a completed step."""
        self._rates.add(progress)
        self._status = status = self._status_of(progress)
        self._metrics_log.step(status)
        self._console.show(status)
        if time.monotonic() - self._last_drawn >= _CURVE_SECONDS:
            self._draw_curve()

    def held_out(self, step: int, bits: float) -> None:
        """Reports bits per byte of a part of the held-out text after `step`, the last reported step or 0."""
        print_stdout(f"step {step}: {self.run_info.measured} bits per byte {bits:.4f} (subset)")
        self._held_out = bits
        self._metrics_log.measure(self._status, {"held_out": bits})
        if self._status:
            self._status = self._status_of(self._status.progress)
            self._console.redraw(self._status)

    def sample(self, draw: Callable[[], Sequence[Sample]]) -> None:
        """Generates samples if they are due; call after each step."""
        p = None if self._status is None else self._status.progress
        if p is not None and self._sample_log.is_due(p):
            record = self._metrics_log.records[-1] | {"step": p.step, "tokens": p.tokens, "fraction": p.fraction}
            self._sample_log.add(record, self._bits(self._held_out), draw)

    def finish(self, bits: float, samples: Sequence[Sample]) -> None:
        """Reports the final result. bits: bits per byte on all of the held-out text."""
        if self._metrics_log.records:
            self._metrics_log.measure(self._status, {"held_out_whole": bits})
            self._sample_log.add(self._metrics_log.records[-1], self._bits(bits), lambda: samples)
            self._draw_curve()

    def _status_of(self, progress: Progress) -> Status:
        rates, run_info = self._rates, self.run_info
        rate, peak = rates.tokens_per_second, run_info.peak_flops
        return Status(
            progress=progress,
            loss=rates.loss,
            tokens_per_second=rate,
            mfu=rate * run_info.flops_per_token / peak if peak else None,
            held_out=self._held_out,
            seconds_left=rates.seconds_left,
        )

    def _bits(self, held_out: float | None) -> dict[str, float]:
        """Name of a text -> bits per byte."""
        training = {"training": self._metrics_log.records[-1]["bits_per_byte"]}
        return training if held_out is None else training | {self.run_info.measured: held_out}

    def _draw_curve(self) -> None:
        picture = loss_curve(self._metrics_log.records, title=self.run_info.title, measured=self.run_info.measured)
        if picture is not None:
            write_extra(self._curve, picture)
        self._last_drawn = time.monotonic()
