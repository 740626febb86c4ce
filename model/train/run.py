"""From text files to a weights directory: python -m model.train --data PATH... --out DIR. Knows nothing of serving.

Prints progress, held-out bits per byte and samples; ends with the command that serves the result.
"""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from model.describe import describe_size
from model.device import choose_device, choose_dtype, describe
from model.train.batch import up_to
from model.train.card import RunFacts, read_about
from model.train.init import base_of, settle, start_anew
from model.train.material import gather
from model.train.objective import Objective
from model.train.optimiser import Optimiser, lr_factor
from model.train.options import shape
from model.train.progress import progress_line, python, tell
from model.train.result import write_result
from model.train.snapshot import Position, load_snapshot, remove_snapshots, save_snapshot
from model.train.sources import DataError
from model.transformer import Decoder

_GLANCE = 40_000
_AT_ONCE = 1024


class Diverged(RuntimeError):
    """The loss is not a finite number any more."""


class Interrupted(RuntimeError):
    """A signal asked the run to end; the state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Run:
    """One training run, from its options to its weights directory."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options = options
        self.command = command
        self.out = Path(options.out)
        self.work = self.out / ".training"
        self.about = read_about(options.about)
        self.device = choose_device(options.device)
        resumes = options.resume and any(self.work.glob("step-*"))
        self.base = base_of(options, self.work, resumes=resumes)
        if self.base:
            settle(options, self.base)
            self.shape = self.base.shape
            self.material = gather(options, options.context, self.work, self.base.tokenizer)
            self.decoder = Decoder(self.shape).to(self.device) if resumes else self.base.decoder(self.device)
        else:
            asked = shape(options)
            self.material = gather(options, asked.context, self.work)
            self.shape = replace(asked, vocab_size=self.material.tokenizer.vocab_size)
            self.decoder = Decoder(self.shape).initialise(options.seed).to(self.device)
        self.optimiser = Optimiser(
            self.decoder,
            options.optimizer,
            matrix_lr=options.matrix_lr,
            other_lr=options.lr,
            weight_decay=options.weight_decay,
        )
        self.objective = Objective(self.decoder, self.device, choose_dtype(options.dtype, self.device))
        self.step = 0
        self.seconds = 0.0
        self._signal = 0

    def train(self) -> None:
        """Trains to the end of the schedule and writes the result."""
        if self.options.overwrite and not self.options.resume:
            remove_snapshots(self.work)
        if self.must_resume():
            self._resume()
        else:
            start_anew(self.base, self.work)
        self._describe()
        self._catch_signals()
        last_report = last_save = started = time.monotonic()
        before = self.seconds
        while (fraction := self.fraction_done()) < 1.0:
            loss = self._update(lr_factor(self.step, fraction, self.options.warm_up))
            self.step += 1
            now = time.monotonic()
            self.seconds = before + now - started
            if self._signal:
                self._save_snapshot()
                raise Interrupted(self._signal)
            if now - last_report >= self.options.report_seconds:
                line = progress_line(self.material, step=self.step, loss=loss, seconds=self.seconds, fraction=fraction)
                print(line, flush=True)
                last_report = now
            if now - last_save >= self.options.save_seconds:
                self._save_snapshot()
                bits = self._bits_per_byte(_GLANCE)
                print(f"step {self.step}: {self.material.measured} bits per byte {bits:.4f} (a glance)", flush=True)
                last_save = time.monotonic()
        self._save_snapshot()
        self._finish()

    def must_resume(self) -> bool:
        """Whether a run stands in the output directory. Raises DataError where nobody said what to do with it."""
        found = any(self.work.glob("step-*"))
        if found and not self.options.resume:
            raise DataError(f"{self.work} holds a run: add --resume to continue it or --overwrite to start anew")
        return found

    def fraction_done(self) -> float:
        """How much of the run is done: the largest share of any limit given."""
        options, step = self.options, self.step
        shares = [
            step / options.steps if options.steps else 0.0,
            self.material.epochs(step) / options.epochs if options.epochs else 0.0,
            self.material.tokens(step) / options.tokens if options.tokens else 0.0,
            self.seconds / (60 * options.max_minutes) if options.max_minutes else 0.0,
        ]
        return max(shares)

    def _update(self, factor: float) -> float:
        """One optimiser step over one batch, in micro-batches. Returns the mean loss in nats per target."""
        batch = self.material.batch(self.step)
        n_targets, losses = batch.n_targets, []
        for part in batch.split(self.options.micro_windows or max(2, _AT_ONCE // batch.row_tokens)):
            loss = self.objective.loss_sum(part) / n_targets
            loss.backward()
            losses.append(loss.detach())
        total = float(torch.stack(losses).sum())
        norm = self.optimiser.clip()
        if not math.isfinite(total) or not math.isfinite(norm):
            raise Diverged(
                f"the loss became {total} and its gradient {norm} at step {self.step}; "
                f"the last snapshot stands in {self.work}"
            )
        self.optimiser.step(factor)
        return total

    def _bits_per_byte(self, n_targets: float = math.inf) -> float:
        """Of what the result is measured on, or of the first so many targets of it."""
        batches = up_to(self.material.held_out, n_targets)
        return self.objective.bits_per_byte(batches, self.material.tokenizer.bytes_of)

    def _position(self) -> Position:
        flags = ("seed", "windows", "optimizer", "matrix_lr", "lr", "weight_decay")
        same = {f"--{name.replace('_', '-')}": str(getattr(self.options, name)) for name in flags}
        if self.base:
            same |= {"--init": str(Path(self.options.init).resolve()), "--context": str(self.options.context)}
        return Position(
            step=self.step,
            seconds=self.seconds,
            digest=self.material.digest,
            shape=repr(self.shape),
            flags=same | {"--dtype": str(self.objective.dtype).removeprefix("torch.")},
        )

    def _save_snapshot(self) -> None:
        weights = {f"decoder.{name}": tensor for name, tensor in self.decoder.state_dict().items()}
        save_snapshot(self.work, self._position(), weights | self.optimiser.tensors())

    def _resume(self) -> None:
        snapshot = load_snapshot(self.work)
        if snapshot is None:
            raise DataError(f"{self.work}: no readable snapshot; start anew with --overwrite")
        position, tensors = snapshot
        position.must_be_of(self._position(), self.work)
        mine = {name.removeprefix("decoder."): t for name, t in tensors.items() if name.startswith("decoder.")}
        self.decoder.load_state_dict(mine)
        self.optimiser.load_tensors(tensors)
        self.step, self.seconds = position.step, position.seconds

    def _describe(self) -> None:
        params, corpus = describe_size(self.decoder.n_params), self.material.corpus
        print(f"{params} parameters on {describe(self.device)}; {corpus}; step {self.step}", flush=True)

    def _finish(self) -> None:
        """The result into the output directory."""
        material, bits = self.material, self._bits_per_byte()
        if not math.isfinite(bits):
            raise Diverged(f"the {material.measured} loss became {bits}; the last snapshot stands in {self.work}")
        facts = RunFacts(
            command=self.command,
            device=describe(self.device),
            seed=self.options.seed,
            steps=self.step,
            tokens=material.tokens(self.step),
            epochs=material.epochs(self.step),
            minutes=self.seconds / 60,
            corpus=material.corpus,
            measured=material.measured,
            bits_per_byte=bits,
            date=datetime.now(UTC).date().isoformat(),
            about=self.about,
        )
        dtype = getattr(torch, self.options.export_dtype)
        prompts, greedy = material.prompts, self.options.greedy
        write_result(
            self.out,
            self.decoder,
            material.tokenizer,
            facts,
            dtype,
            prompts=prompts,
            greedy=greedy,
            base=self.base,
        )
        print(f"{material.measured} bits per byte {bits:.4f} after {self.step} steps, {self.seconds / 60:.1f} minutes")
        print(f"serve it: {python()} -m app serve --weights {shlex.quote(str(self.out))}", flush=True)

    def _catch_signals(self) -> None:
        def first(number: int, _frame: object) -> None:
            self._signal = number
            signal.signal(number, signal.SIG_DFL)  # the second one ends at once
            tell("finishing this step, then saving; the same signal again ends at once")

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, first)
