"""Reports a run to the user: opening and closing summary, console, log.jsonl, loss.svg, samples.md.

The run passes in each step and each measurement; this module decides what is shown where and when.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from model.checkpoint.model_summary import describe_size, shape_lines
from model.config import ModelConfig
from model.train.common.console import counted, duration, python, say, write_extra
from model.train.common.sample import Sample
from model.train.reporting.loss_plot import loss_curve
from model.train.reporting.metrics_log import MetricsLog, TensorBoardLog
from model.train.reporting.model_card import RunFacts
from model.train.reporting.progress import Console, Outline, Pace, Progress, Status
from model.train.reporting.samples import Gallery
from model.train.setup.dataset import Dataset
from model.train.step.schedule import Limits


def opening(config: ModelConfig, n_params: int, material: Dataset, limits: Limits, *, machine: str, step: int) -> str:
    """machine: device and number format in words. step: where the run stands already."""
    shape = dict(shape_lines(config))["shape"]
    lines = [
        f"model: {describe_size(n_params)} parameters ({shape}, vocabulary {config.vocab_size}) on {machine}",
        f"data:  {material.corpus}",
        f"plan:  {_plan(material, limits)}" + (f"; goes on at step {step}" if step else ""),
    ]
    return "\n".join(lines)


def closing(out: Path, facts: RunFacts) -> str:
    """The last lines of all; the very last one can be typed."""
    trained = f"after {facts.steps} steps, {duration(facts.seconds)}"
    size = sum(path.stat().st_size for path in out.iterdir() if path.is_file())
    where = shlex.quote(str(out))
    lines = [
        f"{facts.measured} bits per byte {facts.bits_per_byte:.4f} {trained}",
        *(f"unseen {name}: {bits:.4f} bits per byte" for name, bits in facts.unseen.items()),
        f"written: {where} ({size / 1e6:.1f} MB); look at loss.svg, samples.md and README.md in it",
        f"serve it: {python()} -m app serve --weights {where}",
    ]
    return "\n".join(lines)


def _plan(material: Dataset, limits: Limits) -> str:
    per_step = material.tokens(1)
    batch = f"{material.rows} rows, about {per_step:,} tokens a step"
    share = limits.done(step=1, epochs=material.rows / material.per_epoch, tokens=per_step, seconds=0.0)
    until = [] if limits.minutes is None else [f"{limits.minutes:g} minutes"]
    if share:
        most = max(1, round(1 / share))
        until.append(f"{most:,} steps, {counted(material.tokens(most))} tokens, {material.epochs(most):.2f} epochs")
    return f"{' or '.join(until)}; {batch}"


_CURVE_SECONDS = 30.0


class Report:
    """A context manager: what is drawn on a terminal is gone when it is left, however that happens."""

    def __init__(
        self,
        out: Path,
        outline: Outline,
        *,
        start_step: int,
        report_seconds: float,
        board: TensorBoardLog | None = None,
    ) -> None:
        """start_step: step of the snapshot that the run resumes from, or 0. board: receives the log's records."""
        self.outline, self.board, self.start_step = outline, board, start_step
        self._curve = out / "loss.svg"
        self._journal = MetricsLog(out / "log.jsonl", outline, start_step=start_step, board=board)
        store = out / ".training" / "samples.jsonl"
        self._gallery = Gallery(out / "samples.md", store, title=outline.title, start_step=start_step)
        self._console, self._pace = Console(every=report_seconds), Pace()
        self._held_out = next((r["held_out"] for r in reversed(self._journal.records) if r.get("held_out")), None)
        self._status: Status | None = None
        self._drawn = time.monotonic()

    def __enter__(self) -> Report:
        self._console.__enter__()
        if self.board:
            self.board.start(self.start_step)
        return self

    def __exit__(self, *_: object) -> None:
        self._console.__exit__()
        self._draw_curve()

    def step(self, progress: Progress) -> None:
        """One step of the optimiser is done."""
        self._pace.add(progress)
        self._status = status = self._look(progress)
        self._journal.step(status)
        self._console.show(status)
        if time.monotonic() - self._drawn >= _CURVE_SECONDS:
            self._draw_curve()

    def held_out(self, step: int, bits: float) -> None:
        """Bits per byte of a part of the held-out text were measured after `step`: the last one told, or 0."""
        say(f"step {step}: {self.outline.measured} bits per byte {bits:.4f} (a glance)")
        self._held_out = bits
        self._journal.measure(self._status, {"held_out": bits})
        if self._status:
            self._status = self._look(self._status.progress)
            self._console.redraw(self._status)

    def sample(self, draw: Callable[[], Sequence[Sample]]) -> None:
        """Called after each step: texts are drawn where it is time for some."""
        p = None if self._status is None else self._status.progress
        if p is not None and self._gallery.is_due(p):
            told = self._journal.records[-1] | {"step": p.step, "tokens": p.tokens, "fraction": p.fraction}
            self._gallery.add(told, self._bits(self._held_out), draw)

    def finish(self, bits: float, samples: Sequence[Sample]) -> None:
        """The run is over; its result was measured on all of the held-out text."""
        if self._journal.records:
            self._journal.measure(self._status, {"held_out_whole": bits})
            self._gallery.add(self._journal.records[-1], self._bits(bits), lambda: samples)
            self._draw_curve()

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

    def _bits(self, held_out: float | None) -> dict[str, float]:
        """Bits per byte by what they are of."""
        training = {"training": self._journal.records[-1]["bits_per_byte"]}
        return training if held_out is None else training | {self.outline.measured: held_out}

    def _draw_curve(self) -> None:
        picture = loss_curve(self._journal.records, title=self.outline.title, measured=self.outline.measured)
        if picture is not None:
            write_extra(self._curve, picture)
        self._drawn = time.monotonic()
