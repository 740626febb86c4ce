"""One training run, from its options to its weights directory: sets up, starts or resumes, writes the result.

The training loop itself is in loop.py.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from model.checkpoint.hub import hub_model
from model.checkpoint.model_summary import describe_size
from model.device import choose_device, choose_dtype, describe, free_memory
from model.files import RESUME_FILE, STATE_FOLDER, CheckpointError
from model.nn.transformer import Decoder
from model.train.common.console import Diverged, Interrupted, print_stderr, print_stdout, write_extra
from model.train.common.output_dir import require_disk_space
from model.train.common.sample import DEFAULT_SAMPLING, GREEDY_SAMPLING, Sample, generate_samples
from model.train.data.sources import DataError
from model.train.loop import QUICK_EVAL_TARGETS, Loop
from model.train.reporting.metrics_log import tensorboard_writer
from model.train.reporting.model_card import RunFacts, read_about, shorten_names, write_result
from model.train.reporting.progress import RunInfo
from model.train.reporting.report import Report, closing_summary, opening_summary, serve_command
from model.train.reporting.samples import visible
from model.train.setup.dataset import build_dataset
from model.train.setup.finetune import apply_base_defaults, load_base, save_base_files
from model.train.setup.options import limits, shape
from model.train.setup.resources import flops_per_token, peak_flops, require_memory, sizes
from model.train.step.distributed import ProcessGroup
from model.train.step.loss_backend import choose_loss_backend
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates
from model.train.step.schedule import Schedule
from model.train.step.trainer import Trainer
from model.train.training_checkpoint import Position, load_snapshot, newest_snapshot, remove_snapshots

_SAMPLE_TOKENS = 120
_TRAJECTORY_OPTIONS = [
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
"""Options that determine what a step computes from its tokens."""


class Run:
    """One training run."""

    def __init__(
        self, options: argparse.Namespace, command: str, ranks: ProcessGroup | None = None, *, resume_command: str = ""
    ) -> None:
        self.options, self.command, self.ranks = options, command, ranks or ProcessGroup()
        self.resume_command = resume_command
        self.out = Path(options.out)
        self.work = self.out / STATE_FOLDER
        self.about = read_about(options.about)
        self.tensorboard = tensorboard_writer() if options.tensorboard else None
        self.sampling = GREEDY_SAMPLING if options.greedy else DEFAULT_SAMPLING
        self.resumes = self._should_resume()
        self.device = choose_device(options.device)
        self.base = load_base(options, self.work, resumes=self.resumes)
        if self.base:
            apply_base_defaults(options, self.base)
        config = self.base.shape if self.base else shape(options)
        window, tokenizer = options.context or config.context, self.base.tokenizer if self.base else None
        self.dataset = self.ranks.main_process_first(lambda: build_dataset(options, window, self.work, tokenizer))
        self.shape = config if self.base else replace(config, vocab_size=self.dataset.tokenizer.vocab_size)
        loss_backend = choose_loss_backend(
            options.compile, self.device.type, has_encoder=self.shape.n_encoder_layers > 0
        )
        self._require_resources()
        self.decoder = self._first_decoder().to(self.device)
        self.objective = Objective(self.decoder, self.device, choose_dtype(options.dtype, self.device), loss_backend)
        self.limits = limits(options)
        self.loop = Loop(
            self.dataset,
            self._build_trainer(),
            schedule=Schedule(shape=options.schedule, warm_up=options.warm_up, warm_down=options.warm_down),
            limits=self.limits,
            ranks=self.ranks,
            start=self._initial_position(),
            snapshot_dir=self.work,
            save_seconds=options.save_seconds,
            sampling=self.sampling,
        )

    def train(self) -> None:
        """Trains to the end and writes the result.

        Raises DataError and CheckpointError (bad input), Diverged, and Interrupted once everything is saved.
        """
        if self.resumes:
            self._resume()
        elif self.ranks.is_main:
            remove_snapshots(self.work)
            save_base_files(self.base, self.work)
            if self.options.resume:
                print_stdout("note: there is no snapshot to resume from; the run starts over")
        if self.ranks.is_main:
            note = {"command": self.resume_command, "folder": str(Path.cwd())}
            write_extra(self.work / RESUME_FILE, json.dumps(note))
        machine = f"{describe(self.device)}, {str(self.objective.dtype).removeprefix('torch.')}"
        machine += ", compiled" if self.objective.loss_backend.backend else ""
        size = self.decoder.n_params
        print_stdout(opening_summary(self.shape, size, self.dataset, self.limits, machine=machine, step=self.loop.step))
        with self.loop.stop.handle_signals():
            if not self.ranks.is_main:
                self.loop.run()
                return
            with self._report() as report:
                if self.base and not self.resumes:
                    report.held_out(0, self.loop.bits_per_byte(QUICK_EVAL_TARGETS))  # before training
                self.loop.run(report, self._export_unfinished)
            try:
                self._finish(report)
            except Interrupted:
                self._export_unfinished()
                raise
        (self.work / RESUME_FILE).unlink(missing_ok=True)

    def _should_resume(self) -> bool:
        """Whether to resume a run. Raises DataError if there is one and neither --resume nor --overwrite is given."""
        options, has_run = self.options, newest_snapshot(self.work) is not None
        if has_run and not (options.resume or options.overwrite):
            raise DataError(f"{self.work} holds a run: add --resume to continue it or --overwrite to start over")
        return has_run and bool(options.resume)

    def _require_resources(self) -> None:
        """Checks memory before allocating: the out-of-memory killer may end any process. Raises ValueError."""
        options = self.options
        with torch.device("meta"):
            need = sizes(Decoder(self.shape), options.optimizer, ema=options.ema, export_dtype=options.export_dtype)
        require_memory(need.in_memory, free_memory(self.device))
        if self.ranks.is_main and not self.resumes:
            require_disk_space(self.out, need.on_disk)

    def _first_decoder(self) -> Decoder:
        """The initial decoder; uninitialized if the run resumes and loads its snapshot."""
        if self.base:
            return Decoder(self.shape) if self.resumes else self.base.decoder(self.device)
        return Decoder(self.shape).initialize(self.options.seed)

    def _build_trainer(self) -> Trainer:
        options = self.options
        optimizer = ParameterUpdates(
            self.decoder,
            options.optimizer,
            matrix_lr=options.matrix_lr,
            other_lr=options.lr,
            weight_decay=options.weight_decay,
        )
        micro = options.micro_windows
        return Trainer(self.objective, optimizer, ema=options.ema, ranks=self.ranks, micro_windows=micro)

    def _initial_position(self) -> Position:
        """Position at step 0, with the settings that must or may change when the run resumes."""
        flags = {f"--{name.replace('_', '-')}": str(getattr(self.options, name)) for name in _TRAJECTORY_OPTIONS}
        if self.base:
            flags |= {
                "--init": str(hub_model(self.options.init) or Path(self.options.init).resolve()),
                "--context": str(self.options.context),
            }
        return Position(
            step=0,
            seconds=0.0,
            digest=self.dataset.digest,
            shape=repr(self.shape),
            flags=flags | {"--dtype": str(self.objective.dtype).removeprefix("torch.")},
            rounding={
                "--device": self.device.type,
                "processes": str(self.ranks.size),
                "threads": str(torch.get_num_threads()),
                "--compile": "on" if self.objective.loss_backend.backend else "off",
            },
            limits=self.limits.flags(),
        )

    def _resume(self) -> None:
        snapshot = load_snapshot(self.work)
        if snapshot is None:
            raise DataError(f"{self.work}: no readable snapshot; start over with --overwrite")
        position, tensors = snapshot
        self.loop.trainer.restore_micro_windows(position.rounding.get("--micro-windows", "auto"))
        position.require_same_run(self.loop.position(), self.work)
        for note in position.describe_changes(self.loop.position()):
            print_stdout(f"note: {note}")
        self.loop.restore(position, tensors)

    def _report(self) -> Report:
        options, dataset = self.options, self.dataset
        rates = {"lr": options.lr} | ({"matrix_lr": options.matrix_lr} if options.optimizer == "muon" else {})
        model = Path(options.init).name if self.base else options.preset
        has_peak = self.device.type == "cuda" and self.objective.dtype == torch.bfloat16
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if has_peak else None
        run_info = RunInfo(
            title=f"{model}, {describe_size(self.decoder.n_params)} parameters",
            measured=dataset.measured,
            bytes_per_target=dataset.bytes_per_target(QUICK_EVAL_TARGETS),
            rates=rates,
            flops_per_token=flops_per_token(self.shape, dataset.row_tokens),
            peak_flops=None if peak is None else peak * self.ranks.size,
        )
        start, seconds = self.loop.step, options.report_seconds
        return Report(self.out, run_info, start_step=start, report_seconds=seconds, tensorboard=self.tensorboard)

    def _finish(self, report: Report) -> None:
        """Evaluates the export weights and writes the result to the output directory."""
        loop, dataset, options = self.loop, self.dataset, self.options
        exported = loop.load_final_weights(keep_best=options.keep == "best" and dataset.measured == "held-out")
        print_stdout(f"measuring bits per byte of all of the {dataset.measured} text")  # of much text it takes minutes
        bits = loop.bits_per_byte_of(dataset.held_out)
        if not math.isfinite(bits):
            raise Diverged(f"the {dataset.measured} loss became {bits}", newest_snapshot(self.work))
        names = shorten_names(list(dataset.unseen))
        unseen = {n: loop.bits_per_byte_of(text) for n, text in zip(names, dataset.unseen.values(), strict=True)}
        samples = generate_samples(self.decoder, dataset.tokenizer, dataset.prompts, _SAMPLE_TOKENS, self.sampling)
        if samples:
            print_stdout("samples, each an opening and what the model makes of it:\n")
        for sample in samples:
            print_stdout(f"--- {visible(sample.full_text)}\n")
        report.finish(bits, samples)
        facts = self._facts(exported, bits, unseen)
        self._write_result(facts, samples)
        print_stdout(closing_summary(self.out, facts))

    def _export_unfinished(self) -> None:
        """Writes the best weights so far, so that the directory of an interrupted run serves. Never fails the run."""
        loop, dataset = self.loop, self.dataset
        if not loop.step:
            return
        keep_best = self.options.keep == "best" and dataset.measured == "held-out"
        exported = loop.load_final_weights(keep_best=keep_best)
        bits = loop.best.bits if loop.best.step and (keep_best or loop.best.step == loop.step) else None
        try:
            self._write_result(self._facts(f"{exported}; the run is unfinished", bits, {}), [])
            print_stderr(f"{self.out} can be served ({exported}): {serve_command(self.out)}")
        except CheckpointError as error:
            print_stderr(f"warning: no model was exported ({error})")

    def _write_result(self, facts: RunFacts, samples: Sequence[Sample]) -> None:
        dtype = getattr(torch, self.options.export_dtype)
        write_result(
            self.out,
            self.decoder,
            self.dataset.tokenizer,
            facts,
            dtype,
            samples=samples,
            golden_text=" ".join(prompt.text for prompt in self.dataset.prompts),
            sampling=self.sampling,
            base=self.base,
        )

    def _facts(self, exported: str, bits: float | None, unseen: Mapping[str, float]) -> RunFacts:
        loop, dataset, options = self.loop, self.dataset, self.options
        return RunFacts(
            command=self.command,
            start=f"fine-tuned from `{Path(options.init).name}`" if self.base else "trained from scratch",
            device=describe(self.device),
            seed=options.seed,
            steps=loop.step,
            tokens=dataset.tokens(loop.step),
            epochs=dataset.epochs(loop.step),
            seconds=loop.seconds,
            corpus=dataset.corpus,
            sources=shorten_names(options.pairs or options.data),
            measured=dataset.measured,
            bits_per_byte=bits,
            unseen=unseen,
            date=datetime.now(UTC).date().isoformat(),
            about=self.about,
            exported=exported,
            name=options.name,
            license=options.license,
            language=options.language,
        )
