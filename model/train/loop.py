"""The training loop: steps, evaluation, snapshots."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from model.files import CheckpointError
from model.train.data.batch import Batch, evenly_spaced
from model.train.data.dataset import Dataset
from model.train.interrupts import Interrupted, StopRequest
from model.train.reporting.console import print_stderr
from model.train.reporting.progress import Progress
from model.train.reporting.report import Report
from model.train.reporting.samples import Sample
from model.train.sampling import SamplingSettings, generate_samples
from model.train.step.evaluation import bits_per_byte
from model.train.step.schedule import Limits, Schedule
from model.train.step.trainer import BestWeights, Trainer, copy_tensors, select_prefix
from model.train.training_checkpoint import Position, newest_snapshot, save_snapshot

QUICK_EVAL_TARGETS = 40_000
"""Held-out targets of an evaluation during the run; the final one uses all."""
_SAMPLE_TOKENS = 48
_EVALUATIONS = 20
"""Evaluations, evenly spaced over the run: their steps depend only on its length."""


class Diverged(RuntimeError):
    """The loss, its gradient or the weights are not finite. The weights were not saved."""

    def __init__(self, what: str, snapshot_dir: Path) -> None:
        good = newest_snapshot(snapshot_dir)
        snapshot = f"the last good snapshot is {good}" if good else "there is no snapshot yet"
        super().__init__(
            f"{what}; {snapshot}. Start over with --overwrite and half the --lr (with Muon also the --matrix-lr), or a "
            "longer --warm-up"
        )


class Loop:
    """The state of a run between its first and last step."""

    def __init__(
        self,
        dataset: Dataset,
        trainer: Trainer,
        *,
        schedule: Schedule,
        limits: Limits,
        start: Position,
        snapshot_dir: Path,
        save_seconds: float,
        sampling: SamplingSettings,
    ) -> None:
        """start: position of the run at step 0, for snapshots. sampling: settings of the samples."""
        self.dataset, self.trainer, self.ranks = dataset, trainer, trainer.ranks
        self.schedule, self.limits, self.start = schedule, limits, start
        self.snapshot_dir, self.save_seconds, self.sampling = snapshot_dir, save_seconds, sampling
        self.best, self.stop = BestWeights(), StopRequest()
        self.step, self.seconds = 0, 0.0
        self._is_saved = False

    def run(self, report: Report | None = None, on_interrupt: Callable[[], None] = lambda: None) -> None:
        """Trains to the end and saves; the main rank reports. on_interrupt: called once an interrupted run is saved.

        Raises Diverged, Interrupted (after saving the state of the last complete step), or CheckpointError if saving
        fails.
        """
        try:
            self._train_steps(report)
        except Interrupted:
            self.save()
            on_interrupt()
            self.ranks.barrier()  # a launcher stops all ranks as soon as one exits
            raise
        self._save_or_warn()

    def _train_steps(self, report: Report | None) -> None:
        """Runs steps until a limit is reached."""
        saved_at = time.monotonic()
        start = saved_at - self.seconds
        while (done := self.done) < 1.0:
            lr_factor = self.schedule.lr_factor(self.step, done)
            loss, norm = self.trainer.gradients(self.dataset.batch(self.step), self._check_stop)
            if not math.isfinite(loss) or not math.isfinite(norm):
                what = f"the loss became {loss} and its gradient {norm} in step {self.step + 1}"
                raise Diverged(what, self.snapshot_dir)
            self.trainer.update(self.step, lr_factor)
            self.step += 1
            self.seconds, signal_number = self.ranks.all_reduce_max(time.monotonic() - start, self.stop.number)
            if report:
                report.step(self._progress(loss, norm, lr_factor))
                self._evaluate(report, done_before=done)
            if signal_number:
                raise Interrupted(signal_number)
            if time.monotonic() - saved_at >= self.save_seconds:
                self._save_or_warn()
                saved_at = time.monotonic()

    @property
    def done(self) -> float:
        """Completed fraction of the run; 1 or more at its end."""
        epochs, tokens = self.dataset.epochs(self.step), self.dataset.tokens(self.step)
        return self.limits.done(step=self.step, epochs=epochs, tokens=tokens, seconds=self.seconds)

    def bits_per_byte(self, n_targets: float = math.inf) -> float:
        """Held-out bits per byte of the current weights, on all of it or on about `n_targets` evenly spaced targets."""
        batches = evenly_spaced(self.dataset.held_out, n_targets)
        return bits_per_byte(self.trainer.objective, batches, self.dataset.tokenizer.bytes_of)

    def bits_per_byte_of(self, batches: Iterable[Batch]) -> float:
        """Bits per byte of any text; may take minutes. Raises Interrupted."""
        until_stopped = self._until_stopped(batches)
        return bits_per_byte(self.trainer.objective, until_stopped, self.dataset.tokenizer.bytes_of)

    def position(self) -> Position:
        """Current position of the run."""
        return replace(
            self.start,
            step=self.step,
            seconds=self.seconds,
            rounding=self.start.rounding | {"--micro-windows": str(self.trainer.micro_windows or "auto")},
            best_step=self.best.step,
            best_bits=self.best.bits if self.best.step else None,
        )

    def restore(self, position: Position, tensors: dict[str, Tensor]) -> None:
        """Restores the state of a snapshot."""
        self.step, self.seconds = position.step, position.seconds
        self.trainer.load_tensors(tensors)
        if position.best_bits is not None:
            self.best.step, self.best.bits = position.best_step, position.best_bits
            self.best.tensors = select_prefix("best", tensors)

    def load_final_weights(self, *, keep_best: bool) -> str:
        """Loads the weights to export into the decoder and returns a description of them. Ends the training."""
        average, weights = self.trainer.average, dict(self.trainer.decoder.named_parameters())
        what = f"average of the last steps (decay {average.decay})" if average else "weights"
        if keep_best and 0 < self.best.step < self.step:
            copy_tensors(self.best.tensors, weights)
            return f"{what} after step {self.best.step} of {self.step}, the fewest held-out bits"
        if average:
            copy_tensors(average.tensors, weights)
        return f"{what} after the last step"

    def save(self) -> None:
        """Saves a snapshot. Raises CheckpointError if the disk is full, and Diverged if the weights are not finite."""
        if not self.ranks.is_main:
            return
        if not self.trainer.is_finite() or not math.isfinite(self.bits_per_byte(1)):
            raise Diverged(f"the weights are not finite after step {self.step}", self.snapshot_dir)
        best = {f"best.{name}": tensor for name, tensor in self.best.tensors.items()}
        self._is_saved = False
        try:
            save_snapshot(self.snapshot_dir, self.position(), self.trainer.tensors() | best)
        except CheckpointError as error:
            older = newest_snapshot(self.snapshot_dir)
            previous = f"{older} remains the latest" if older else "there is none yet"
            raise CheckpointError(f"no snapshot of step {self.step}, {previous}: {error}") from None
        self._is_saved = True

    def _save_or_warn(self) -> None:
        """Saves, or warns and continues: a full disk may have space again later."""
        try:
            self.save()
        except CheckpointError as error:
            print_stderr(f"warning: {error}; training continues")

    def _evaluate(self, report: Report, *, done_before: float) -> None:
        """Evaluates the export weights when due, keeps the best ones, and generates samples.

        Signals do not interrupt an evaluation, so that a resumed run has the same evaluations as an uninterrupted one.
        """
        if int(self.done * _EVALUATIONS) > int(done_before * _EVALUATIONS):
            with self.trainer.averaged():
                bits = self.bits_per_byte(QUICK_EVAL_TARGETS)
                self.best.keep_if_best(self.trainer.decoder, self.step, bits)
            report.held_out(self.step, bits)
        if not self.stop.number:
            report.sample(self._draw_samples)

    def _draw_samples(self) -> list[Sample]:
        """Samples of the weights that would be exported."""
        tokenizer, prompts = self.dataset.tokenizer, self.dataset.prompts
        with self.trainer.averaged():
            return generate_samples(self.trainer.decoder, tokenizer, prompts, _SAMPLE_TOKENS, self.sampling)

    def _progress(self, loss: float, norm: float, lr_factor: float) -> Progress:
        return Progress(
            step=self.step,
            loss=loss,
            lr_factor=lr_factor,
            grad_norm=norm,
            tokens=self.dataset.tokens(self.step),
            epoch=self.dataset.epochs(self.step),
            fraction=min(1.0, self.done),
            seconds=self.seconds,
        )

    def _check_stop(self) -> None:
        """Stops between micro-batches if requested. Several ranks must stop together, between steps."""
        if self.ranks.size == 1:
            self.stop.raise_if_stopped()

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, until a stop is requested. If the last step could not be saved, finishes to keep its result."""
        for batch in batches:
            if self._is_saved:
                self._check_stop()
            yield batch
