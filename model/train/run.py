"""One training run, from its options to its weights directory: sets up, starts or resumes, writes the result.

The training loop itself is in loop.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from model.checkpoint.model_summary import describe_size
from model.device import choose_device, choose_dtype, describe, free_memory
from model.nn.transformer import Decoder
from model.train.common.console import Diverged, say
from model.train.common.output_dir import require_room
from model.train.common.sample import GREEDY, LIVELY, draw_samples
from model.train.data.sources import DataError
from model.train.loop import GLANCE, Loop
from model.train.reporting.metrics_log import TensorBoardLog
from model.train.reporting.model_card import RunFacts, read_about, without_places, write_result
from model.train.reporting.progress import Outline
from model.train.reporting.report import Report, closing, opening
from model.train.reporting.samples import visible
from model.train.setup.dataset import gather
from model.train.setup.finetune import base_of, settle, start_anew
from model.train.setup.options import limits, shape
from model.train.setup.resources import flops_per_token, peak_flops, require_memory, sizes
from model.train.step.distributed import ProcessGroup
from model.train.step.loss_backend import computing_for
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates
from model.train.step.schedule import Schedule
from model.train.step.trainer import Trainer
from model.train.training_checkpoint import Position, load_snapshot, newest_snapshot, remove_snapshots

_SAMPLE_TOKENS = 120
_DECISIVE = [
    "seed",
    "windows",
    "optimizer",
    "matrix_lr",
    "lr",
    "weight_decay",
    "schedule",
    "warm_up",
    "warm_down",
    "ema",
]
"""Options that decide what a step does with the tokens it sees."""


class Run:
    """One training run."""

    def __init__(self, options: argparse.Namespace, command: str, ranks: ProcessGroup | None = None) -> None:
        self.options, self.command, self.ranks = options, command, ranks or ProcessGroup()
        self.out = Path(options.out)
        self.work = self.out / ".training"
        self.about = read_about(options.about)
        self.board = TensorBoardLog(self.out / "tensorboard") if options.tensorboard else None
        self.drawing = GREEDY if options.greedy else LIVELY
        self.resumes = self._must_resume()
        self.device = choose_device(options.device)
        self.base = base_of(options, self.work, resumes=self.resumes)
        if self.base:
            settle(options, self.base)
        asked = self.base.shape if self.base else shape(options)
        window, tokenizer = options.context or asked.context, self.base.tokenizer if self.base else None
        self.material = self.ranks.in_turn(lambda: gather(options, window, self.work, tokenizer))
        self.shape = asked if self.base else replace(asked, vocab_size=self.material.tokenizer.vocab_size)
        computing = computing_for(options.compile, self.device.type, has_encoder=self.shape.n_encoder_layers > 0)
        self._must_fit()
        self.decoder = self._first_decoder().to(self.device)
        self.objective = Objective(self.decoder, self.device, choose_dtype(options.dtype, self.device), computing)
        self.limits = limits(options)
        self.loop = Loop(
            self.material,
            self._learner(),
            schedule=Schedule(shape=options.schedule, warm_up=options.warm_up, warm_down=options.warm_down),
            limits=self.limits,
            ranks=self.ranks,
            start=self._start(),
            folder=self.work,
            save_seconds=options.save_seconds,
            drawing=self.drawing,
        )

    def train(self) -> None:
        """Trains to the end and writes the result.

        Raises DataError and CheckpointError (bad input), Diverged, and Interrupted once everything is saved.
        """
        if self.resumes:
            self._go_on()
        elif self.ranks.is_first:
            remove_snapshots(self.work)
            start_anew(self.base, self.work)
            if self.options.resume:
                say("note: there is no snapshot to go on from; the run begins anew")
        machine = f"{describe(self.device)}, {str(self.objective.dtype).removeprefix('torch.')}"
        machine += ", compiled" if self.objective.computing.backend else ""
        size = self.decoder.n_params
        say(opening(self.shape, size, self.material, self.limits, machine=machine, step=self.loop.step))
        with self.loop.stop.caught():
            if not self.ranks.is_first:
                self.loop.run()
                return
            with self._report() as report:
                if self.base and not self.resumes:
                    report.held_out(0, self.loop.bits_per_byte(GLANCE))  # what it knew before
                self.loop.run(report)
            self._finish(report)

    def _must_resume(self) -> bool:
        """Whether to resume a run. Raises DataError if there is one and neither --resume nor --overwrite is given."""
        options, found = self.options, newest_snapshot(self.work) is not None
        if found and not (options.resume or options.overwrite):
            raise DataError(f"{self.work} holds a run: add --resume to continue it or --overwrite to start anew")
        return found and bool(options.resume)

    def _must_fit(self) -> None:
        """Checks memory before allocating: the out-of-memory killer may end any process. Raises ValueErrors."""
        options = self.options
        with torch.device("meta"):
            need = sizes(Decoder(self.shape), options.optimizer, ema=options.ema, export_dtype=options.export_dtype)
        require_memory(need.in_memory, free_memory(self.device))
        if self.ranks.is_first and not self.resumes:
            require_room(self.out, need.on_disk)

    def _first_decoder(self) -> Decoder:
        """What the run begins from; for one that goes on, room for what its snapshot holds."""
        if self.base:
            return Decoder(self.shape) if self.resumes else self.base.decoder(self.device)
        return Decoder(self.shape).initialise(self.options.seed)

    def _learner(self) -> Trainer:
        options = self.options
        optimiser = ParameterUpdates(
            self.decoder,
            options.optimizer,
            matrix_lr=options.matrix_lr,
            other_lr=options.lr,
            weight_decay=options.weight_decay,
        )
        micro = options.micro_windows
        return Trainer(self.objective, optimiser, ema=options.ema, ranks=self.ranks, micro_windows=micro)

    def _start(self) -> Position:
        """What must be the same when the run goes on, and what may change."""
        flags = {f"--{name.replace('_', '-')}": str(getattr(self.options, name)) for name in _DECISIVE}
        if self.base:
            flags |= {"--init": str(Path(self.options.init).resolve()), "--context": str(self.options.context)}
        return Position(
            step=0,
            seconds=0.0,
            digest=self.material.digest,
            shape=repr(self.shape),
            flags=flags | {"--dtype": str(self.objective.dtype).removeprefix("torch.")},
            rounding={
                "--device": self.device.type,
                "processes": str(self.ranks.size),
                "threads": str(torch.get_num_threads()),
                "--compile": "on" if self.objective.computing.backend else "off",
            },
            limits=self.limits.flags(),
        )

    def _go_on(self) -> None:
        snapshot = load_snapshot(self.work)
        if snapshot is None:
            raise DataError(f"{self.work}: no readable snapshot; start anew with --overwrite")
        position, tensors = snapshot
        self.loop.learner.take_micro_windows(position.rounding.get("--micro-windows", "auto"))
        position.must_be_of(self.loop.position(), self.work)
        for note in position.notes(self.loop.position()):
            say(f"note: {note}")
        self.loop.go_on_from(position, tensors)

    def _report(self) -> Report:
        options, material = self.options, self.material
        rates = {"lr": options.lr} | ({"matrix_lr": options.matrix_lr} if options.optimizer == "muon" else {})
        model = Path(options.init).name if self.base else options.preset
        peak = peak_flops(self.device, self.objective.dtype)
        outline = Outline(
            title=f"{model}, {describe_size(self.decoder.n_params)} parameters",
            measured=material.measured,
            bytes_per_target=material.bytes_per_target(GLANCE),
            rates=rates,
            flops_per_token=flops_per_token(self.shape, material.row_tokens),
            peak_flops=None if peak is None else peak * self.ranks.size,
        )
        start, seconds = self.loop.step, options.report_seconds
        return Report(self.out, outline, start_step=start, report_seconds=seconds, board=self.board)

    def _finish(self, report: Report) -> None:
        """The result into the output directory."""
        loop, material, options = self.loop, self.material, self.options
        exported = loop.settle(keep_best=options.keep == "best" and material.measured == "held-out")
        say(f"measuring bits per byte of all of the {material.measured} text")  # of much text it takes minutes
        bits = loop.bits_per_byte_of(material.held_out)
        if not math.isfinite(bits):
            raise Diverged(f"the {material.measured} loss became {bits}", newest_snapshot(self.work))
        names = without_places(list(material.unseen))
        unseen = {n: loop.bits_per_byte_of(text) for n, text in zip(names, material.unseen.values(), strict=True)}
        tokenizer, drawing = material.tokenizer, self.drawing
        samples = draw_samples(self.decoder, tokenizer, material.prompts, _SAMPLE_TOKENS, drawing)
        for sample in samples:
            say(f"--- {visible(sample.joined)}\n")
        report.finish(bits, samples)
        facts, dtype = self._facts(exported, bits, unseen), getattr(torch, options.export_dtype)
        base = self.base
        write_result(self.out, self.decoder, tokenizer, facts, dtype, samples=samples, drawing=drawing, base=base)
        say(closing(self.out, facts))

    def _facts(self, exported: str, bits: float, unseen: Mapping[str, float]) -> RunFacts:
        loop, material, options = self.loop, self.material, self.options
        return RunFacts(
            command=self.command,
            start=f"fine-tuned from `{Path(options.init).name}`" if self.base else "trained from scratch",
            device=describe(self.device),
            seed=options.seed,
            steps=loop.step,
            tokens=material.tokens(loop.step),
            epochs=material.epochs(loop.step),
            seconds=loop.seconds,
            corpus=material.corpus,
            sources=without_places(options.pairs or options.data),
            measured=material.measured,
            bits_per_byte=bits,
            unseen=unseen,
            date=datetime.now(UTC).date().isoformat(),
            about=self.about,
            exported=exported,
            license=options.license,
            language=options.language,
        )
