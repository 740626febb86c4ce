"""The training loop: steps, evaluation, snapshots.

A step itself is in step/trainer.py, its data in setup/dataset.py, output for the user in reporting/report.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from model.files import CheckpointError
from model.train.common.console import Diverged, Interrupted, StopRequest, tell
from model.train.common.sample import Drawing, Sample, draw_samples
from model.train.data.batch import Batch, spread
from model.train.reporting.progress import Progress
from model.train.reporting.report import Report
from model.train.setup.dataset import Dataset
from model.train.step.distributed import ProcessGroup
from model.train.step.schedule import Limits, Schedule
from model.train.step.trainer import BestWeights, Trainer, below
from model.train.training_checkpoint import Position, newest_snapshot, save_snapshot

GLANCE = 40_000
"""Held-out targets of a measurement on the way; the last one takes all there are."""
_SAMPLE_TOKENS = 48
_MEASUREMENTS = 20
"""Over the whole run, evenly: which steps they follow depends on nothing but the run's length."""


class Loop:
    """A run between its first step and its last one."""

    def __init__(
        self,
        material: Dataset,
        learner: Trainer,
        *,
        schedule: Schedule,
        limits: Limits,
        ranks: ProcessGroup,
        start: Position,
        folder: Path,
        save_seconds: float,
        drawing: Drawing,
    ) -> None:
        """start: what the snapshots are to say of the run, at step 0. folder: where they go. drawing: of samples."""
        self.material, self.learner, self.ranks = material, learner, ranks
        self.schedule, self.limits, self.start = schedule, limits, start
        self.folder, self.save_seconds, self.drawing = folder, save_seconds, drawing
        self.best, self.stop = BestWeights(), StopRequest()
        self.step, self.seconds = 0, 0.0
        self._is_saved = False

    def run(self, report: Report | None = None) -> None:
        """Trains to the end and saves; the first rank reports.

        Raises Diverged, Interrupted once the state of the last whole step is saved, and CheckpointError where it
        cannot be.
        """
        try:
            self._learn(report)
        except Interrupted:
            self.save()
            self.ranks.wait()  # a launcher ends all ranks as soon as one leaves
            raise
        self._save_or_warn()

    def _learn(self, report: Report | None) -> None:
        """From step to step: this is what training is."""
        saved_at = time.monotonic()
        began = saved_at - self.seconds
        while (done := self.done) < 1.0:
            lr_factor = self.schedule.lr_factor(self.step, done)
            loss, norm = self.learner.gradients(self.material.batch(self.step), self._breathe)
            self._must_be_finite(loss, norm)
            self.learner.update(self.step, lr_factor)
            self.step += 1
            self.seconds, signal_number = self.ranks.agree(time.monotonic() - began, self.stop.number)
            if report:
                report.step(self._progress(loss, norm, lr_factor))
                self._look(report, done_before=done)
            if signal_number:
                raise Interrupted(signal_number)
            if time.monotonic() - saved_at >= self.save_seconds:
                self._save_or_warn()
                saved_at = time.monotonic()

    @property
    def done(self) -> float:
        """How much of the run is done: 1 or more at its end."""
        epochs, tokens = self.material.epochs(self.step), self.material.tokens(self.step)
        return self.limits.done(step=self.step, epochs=epochs, tokens=tokens, seconds=self.seconds)

    def bits_per_byte(self, n_targets: float = math.inf) -> float:
        """What the weights that stand there need for the held-out text, or for so many targets from all over it."""
        return self.learner.objective.bits_per_byte(
            spread(self.material.held_out, n_targets), self.material.tokenizer.bytes_of
        )

    def bits_per_byte_of(self, batches: Iterable[Batch]) -> float:
        """The same of any text, which may take minutes. Raises Interrupted."""
        return self.learner.objective.bits_per_byte(self._until_stopped(batches), self.material.tokenizer.bytes_of)

    def position(self) -> Position:
        """Where the run stands."""
        rounding = self.start.rounding | {"--micro-windows": str(self.learner.micro_windows or "auto")}
        best_bits = self.best.bits if self.best.step else None
        return replace(
            self.start,
            step=self.step,
            seconds=self.seconds,
            rounding=rounding,
            best_step=self.best.step,
            best_bits=best_bits,
        )

    def go_on_from(self, position: Position, tensors: dict[str, Tensor]) -> None:
        """Stands where a snapshot was taken, as if nothing had happened since."""
        self.step, self.seconds = position.step, position.seconds
        self.learner.load_tensors(tensors)
        if position.best_bits is not None:
            self.best.load(below("best", tensors), step=position.best_step, bits=position.best_bits)

    def settle(self, *, keep_best: bool) -> str:
        """Leaves the weights to be exported in the decoder, and says which they are; nothing is learnt any more."""
        average = self.learner.average
        what = f"average of the last steps (decay {average.decay})" if average else "weights"
        if keep_best and 0 < self.best.step < self.step:
            self.best.settle(self.learner.decoder)
            return f"{what} after step {self.best.step} of {self.step}, the fewest bits on the way"
        if average:
            average.settle()
        return f"{what} after the last step"

    def save(self) -> None:
        """Raises CheckpointError where the disk is full, and Diverged where there is nothing worth saving."""
        if not self.ranks.is_first:
            return
        if not self.learner.is_finite() or not math.isfinite(self.bits_per_byte(1)):
            raise Diverged(f"the weights are of no use after step {self.step}", newest_snapshot(self.folder))
        best = {f"best.{name}": tensor for name, tensor in self.best.tensors().items()}
        self._is_saved = False
        try:
            save_snapshot(self.folder, self.position(), self.learner.tensors() | best)
        except CheckpointError as error:
            older = newest_snapshot(self.folder)
            stands = f"{older} stays the last one" if older else "there is none yet"
            raise CheckpointError(f"no snapshot of step {self.step}, {stands}: {error}") from None
        self._is_saved = True

    def _save_or_warn(self) -> None:
        """A full disk may have room again later, and hours of training are worth going on."""
        try:
            self.save()
        except CheckpointError as error:
            tell(f"warning: {error}; the run goes on")

    def _look(self, report: Report, *, done_before: float) -> None:
        """Now and then: what would be exported is measured, of which the best is kept, and made to write something.

        No signal ends a measurement: a run that goes on from its snapshot has measured what one without a break has.
        """
        if int(self.done * _MEASUREMENTS) > int(done_before * _MEASUREMENTS):
            with self.learner.averaged():
                bits = self.bits_per_byte(GLANCE)
                self.best.consider(self.learner.decoder, self.step, bits)
            report.held_out(self.step, bits)
        if not self.stop.number:
            report.sample(self._draw_samples)

    def _draw_samples(self) -> list[Sample]:
        """Of the weights that would be exported."""
        tokenizer, prompts = self.material.tokenizer, self.material.prompts
        with self.learner.averaged():
            return draw_samples(self.learner.decoder, tokenizer, prompts, _SAMPLE_TOKENS, self.drawing)

    def _progress(self, loss: float, norm: float, lr_factor: float) -> Progress:
        return Progress(
            step=self.step,
            loss=loss,
            lr_factor=lr_factor,
            grad_norm=norm,
            tokens=self.material.tokens(self.step),
            epoch=self.material.epochs(self.step),
            fraction=min(1.0, self.done),
            seconds=self.seconds,
        )

    def _must_be_finite(self, loss: float, norm: float) -> None:
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise Diverged(
                f"the loss became {loss} and its gradient {norm} in step {self.step + 1}", newest_snapshot(self.folder)
            )

    def _breathe(self) -> None:
        """Between micro-batches. Several ranks can only stop together, between steps."""
        if self.ranks.size == 1:
            self.stop.obey()

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches. Where the last step could not be saved, a signal would lose it: the result comes first."""
        for batch in batches:
            if self._is_saved:
                self._breathe()
            yield batch
