"""From text files to a weights directory: python -m model.train --data PATH... --out DIR. Knows nothing of serving.

Prints progress, held-out bits per byte and samples; ends with the command that serves the result.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from model.card import RunFacts, read_about
from model.data import Corpus, DataError, Order, prepare
from model.device import choose_device, choose_dtype, describe
from model.objective import Objective
from model.optimiser import Optimiser, lr_factor
from model.options import parser, shape
from model.result import write_result
from model.snapshot import Position, load_snapshot, remove_snapshots, save_snapshot
from model.transformer import Decoder


class Diverged(RuntimeError):
    """The loss is not a finite number any more."""


class Interrupted(RuntimeError):
    """A signal asked the run to end; the state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 bad input, 3 diverged, 130 / 143 interrupted with everything saved."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(arguments)
    try:
        Run(options, shlex.join(["python", "-m", "model.train", *arguments])).train()
    except ValueError as error:  # DataError, ConfigError, TokenizerError, CheckpointError: all speak to the user
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except Interrupted as interrupt:
        kept = [argument for argument in arguments if argument not in ("--resume", "--overwrite")]
        again = shlex.join([_python(), "-m", "model.train", *kept, "--resume"])
        _tell(f"interrupted by {interrupt}; everything is saved. Go on with:\n{again}")
        return interrupt.exit_code
    except KeyboardInterrupt:  # before the first step; nothing is lost
        return 130
    return 0


class Run:
    """One training run, from its options to its weights directory."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.options = options
        self.command = command
        self.out = Path(options.out)
        self.work = self.out / ".training"
        self.about = read_about(options.about)
        self.device = choose_device(options.device)
        self.shape = shape(options)
        self.corpus: Corpus = prepare(
            options.data, self.work, vocab_size=self.shape.vocab_size, straighten=options.straighten
        )
        self.order = Order(self.corpus.train, length=self.shape.context, windows=options.windows, seed=options.seed)
        self.decoder = Decoder(self.shape).initialise(options.seed).to(self.device)
        self.optimiser = Optimiser(
            self.decoder, matrix_lr=options.matrix_lr, other_lr=options.lr, weight_decay=options.weight_decay
        )
        self.objective = Objective(self.decoder, self.device, choose_dtype(options.dtype, self.device))
        self.held_out = torch.from_numpy(self.corpus.held_out.astype("int64"))
        self.step = 0
        self.seconds = 0.0
        self._signal = 0

    def train(self) -> None:
        """Trains to the end of the schedule and writes the result."""
        if self.options.overwrite and not self.options.resume:
            remove_snapshots(self.work)
        if self.must_resume():
            self._resume()
        self._describe()
        self._catch_signals()
        last_report = last_save = started = time.monotonic()
        before = self.seconds
        while (fraction := self.fraction_done()) < 1.0:
            loss = self._update(lr_factor(self.step, fraction))
            self.step += 1
            now = time.monotonic()
            self.seconds = before + now - started
            if self._signal:
                self._save_snapshot()
                raise Interrupted(self._signal)
            if now - last_report >= self.options.report_seconds:
                self._report(loss, fraction)
                last_report = now
            if now - last_save >= self.options.save_seconds:
                self._save_snapshot()
                bits = self.objective.bits_per_byte(self.held_out[:40_000], self.corpus.tokenizer.bytes_of)
                print(f"step {self.step}: held-out bits per byte {bits:.4f} (first 40,000 tokens)", flush=True)
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
        options, tokens_a_step = self.options, self.options.windows * self.shape.context
        shares = [
            self.step / options.steps if options.steps else 0.0,
            self.step * self.options.windows / (options.epochs * self.order.per_epoch) if options.epochs else 0.0,
            self.step * tokens_a_step / options.tokens if options.tokens else 0.0,
            self.seconds / (60 * options.max_minutes) if options.max_minutes else 0.0,
        ]
        return max(shares)

    def _update(self, factor: float) -> float:
        """One optimiser step over `windows` windows, in micro-batches. Returns the mean loss in nats per token."""
        windows = torch.from_numpy(self.order.batch(self.step))
        losses = []
        for part in windows.split(self.options.micro_windows):
            loss = self.objective.loss_sum(part) / (len(windows) * self.shape.context)
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

    def _save_snapshot(self) -> None:
        position = Position(
            step=self.step,
            seconds=self.seconds,
            digest=self.corpus.digest,
            shape=repr(self.shape),
            order=self._order_name(),
        )
        weights = {f"decoder.{name}": tensor for name, tensor in self.decoder.state_dict().items()}
        save_snapshot(self.work, position, weights | self.optimiser.tensors())

    def _order_name(self) -> str:
        return f"seed {self.options.seed}, {self.options.windows} windows"

    def _resume(self) -> None:
        snapshot = load_snapshot(self.work)
        if snapshot is None:
            raise DataError(f"{self.work}: no readable snapshot; start anew with --overwrite")
        position, tensors = snapshot
        if position.shape != repr(self.shape):
            raise DataError(f"the run in {self.work} has another shape; give the same flags or --overwrite")
        if position.digest != self.corpus.digest:
            raise DataError(f"the run in {self.work} was started on other data; give the same data or --overwrite")
        if position.order != self._order_name():
            raise DataError(f"the run in {self.work} had other --seed or --windows; give the same or --overwrite")
        mine = {name.removeprefix("decoder."): t for name, t in tensors.items() if name.startswith("decoder.")}
        self.decoder.load_state_dict(mine)
        self.optimiser.load_tensors(tensors)
        self.step, self.seconds = position.step, position.seconds

    def _describe(self) -> None:
        corpus = self.corpus
        print(
            f"{self.decoder.n_params / 1e6:.2f} M parameters on {describe(self.device)}; {corpus.n_documents} "
            f"documents, {len(corpus.train)} training and {len(corpus.held_out)} held-out tokens; step {self.step}",
            flush=True,
        )

    def _report(self, loss: float, fraction: float) -> None:
        tokens = self.step * self.options.windows * self.shape.context
        epoch = self.step * self.options.windows / self.order.per_epoch
        left = self.seconds * (1 - fraction) / max(fraction, 1e-9)
        print(
            f"step {self.step} loss {loss:.4f} tokens {tokens / 1e6:.2f}M epoch {epoch:.2f}"
            f" {tokens / self.seconds:.0f} tokens/s {100 * fraction:.1f} % done, {left / 60:.0f} min left",
            flush=True,
        )

    def _finish(self) -> None:
        """The result into the output directory."""
        bits = self.objective.bits_per_byte(self.held_out, self.corpus.tokenizer.bytes_of)
        if not math.isfinite(bits):
            raise Diverged(f"the held-out loss became {bits}; the last snapshot stands in {self.work}")
        facts = RunFacts(
            command=self.command,
            device=describe(self.device),
            seed=self.options.seed,
            steps=self.step,
            tokens=self.step * self.options.windows * self.shape.context,
            minutes=self.seconds / 60,
            train_tokens=len(self.corpus.train),
            n_documents=self.corpus.n_documents,
            bits_per_byte=bits,
            date=datetime.now(UTC).date().isoformat(),
            about=self.about,
        )
        write_result(self.out, self.decoder, self.corpus.tokenizer, facts, getattr(torch, self.options.export_dtype))
        print(f"held-out bits per byte {bits:.4f} after {self.step} steps, {self.seconds / 60:.1f} minutes")
        print(f"serve it: {_python()} -m app serve --weights {shlex.quote(str(self.out))}", flush=True)

    def _catch_signals(self) -> None:
        def first(number: int, _frame: object) -> None:
            self._signal = number
            signal.signal(number, signal.SIG_DFL)  # the second one ends at once
            _tell("finishing this step, then saving; the same signal again ends at once")

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, first)


def _tell(text: str) -> None:
    """To a terminal that may have gone with the same signal (| tee): the run must be saved all the same."""
    with contextlib.suppress(OSError, RuntimeError):
        print(text, file=sys.stderr, flush=True)


def _python() -> str:
    """This interpreter, as it can be typed from here."""
    here, executable = Path.cwd(), Path(sys.executable)
    return str(executable.relative_to(here) if executable.is_relative_to(here) else executable)


if __name__ == "__main__":
    sys.exit(main())
