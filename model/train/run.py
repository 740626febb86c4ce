"""One training run, from its options to its weights directory: sets up, starts or resumes, writes the result.

The training loop itself is in loop.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from model.checkpoint.checkpoint import weights_files
from model.checkpoint.golden import GOLDEN_FILE, MAX_PROMPT_IDS
from model.checkpoint.golden_export import as_stored, golden_file
from model.checkpoint.hub import hub_model
from model.checkpoint.manifest import MANIFEST_FILE, manifest_file
from model.checkpoint.model_summary import describe_size, shape_lines
from model.checkpoint.tensor_index import WEIGHTS_FILE
from model.device import choose_device, describe, free_memory
from model.files import RESUME_FILE, STATE_FOLDER, CheckpointError, parse_object, write_files
from model.nn.transformer import Decoder
from model.train.data.dataset import Dataset, build_dataset, report_left_out
from model.train.data.sources import DataError
from model.train.finetune import apply_base_defaults, load_base, save_base_files
from model.train.interrupts import Interrupted
from model.train.loop import QUICK_EVAL_TARGETS, Diverged, Loop
from model.train.options import flag_values, limits, shape
from model.train.output_dir import require_disk_space
from model.train.reporting.console import (
    duration,
    format_count,
    print_stderr,
    print_stdout,
    program_command,
    write_extra,
)
from model.train.reporting.metrics_log import tensorboard_writer
from model.train.reporting.model_card import model_card, read_about, shorten_names
from model.train.reporting.progress import RunInfo
from model.train.reporting.report import Report
from model.train.reporting.samples import Sample, plain, visible
from model.train.resources import flops_per_token, meta_decoder, peak_flops, require_memory, sizes
from model.train.sampling import DEFAULT_SAMPLING, GREEDY_SAMPLING, generate_samples
from model.train.step.distributed import ProcessGroup
from model.train.step.schedule import Limits, Schedule
from model.train.step.trainer import build_trainer
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
        if self.ranks.is_main:
            report_left_out(options)
        self.shape = config if self.base else replace(config, vocab_size=self.dataset.tokenizer.vocab_size)
        self._require_resources()
        self.decoder = self._first_decoder().to(self.device)
        self.trainer = build_trainer(self.decoder, options, self.device, self.ranks)
        self.objective = self.trainer.objective
        self.limits = limits(options)
        self.loop = Loop(
            self.dataset,
            self.trainer,
            schedule=Schedule(shape=options.schedule, warm_up=options.warm_up, warm_down=options.warm_down),
            limits=self.limits,
            start=self._initial_position(),
            snapshot_dir=self.work,
            save_seconds=options.save_seconds,
            sampling=self.sampling,
        )
        self.keep_best = options.keep == "best" and self.dataset.measured == "held-out"

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
        self._print_plan()
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
        """Checks memory and disk before allocating. Raises ValueError."""
        options, decoder = self.options, meta_decoder(self.shape)
        need = sizes(decoder, options.optimizer, ema=options.ema, export_dtype=options.export_dtype)
        require_memory(need.in_memory, free_memory(self.device))
        if self.ranks.is_main and not self.resumes:
            require_disk_space(self.out, need.on_disk)

    def _first_decoder(self) -> Decoder:
        """The initial decoder; uninitialized if the run resumes and loads its snapshot."""
        if self.base:
            return Decoder(self.shape) if self.resumes else self.base.decoder(self.device)
        return Decoder(self.shape).initialize(self.options.seed)

    def _initial_position(self) -> Position:
        """Position at step 0, with the settings that must or may change when the run resumes."""
        flags = flag_values(self.options, _TRAJECTORY_OPTIONS)
        if self.base:
            init = str(hub_model(self.options.init) or Path(self.options.init).resolve())
            flags |= {"--init": init, "--context": str(self.options.context)}
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
        self.trainer.restore_micro_windows(position.rounding.get("--micro-windows", "auto"))
        position.require_same_run(self.loop.position(), self.work)
        for note in position.describe_changes(self.loop.position()):
            print_stdout(f"note: {note}")
        self.loop.restore(position, tensors)

    def _print_plan(self) -> None:
        device = f"{describe(self.device)}, {str(self.objective.dtype).removeprefix('torch.')}"
        device += ", compiled" if self.objective.loss_backend.backend else ""
        layers, size = dict(shape_lines(self.shape))["shape"], describe_size(self.decoder.n_params)
        plan = f"{_length(self.dataset, self.limits)}; {self.dataset.rows} rows a step"
        plan += f"; goes on at step {self.loop.step}" if self.loop.step else ""
        print_stdout(f"model: {size} parameters ({layers}, vocabulary {self.shape.vocab_size}) on {device}")
        print_stdout(f"data:  {self.dataset.corpus}\nplan:  {plan}")

    def _report(self) -> Report:
        options, dataset = self.options, self.dataset
        model = Path(options.init).name if self.base else options.preset
        has_peak = self.device.type == "cuda" and self.objective.dtype == torch.bfloat16
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if has_peak else None
        run_info = RunInfo(
            title=f"{model}, {describe_size(self.decoder.n_params)} parameters",
            measured=dataset.measured,
            bytes_per_target=dataset.bytes_per_target(QUICK_EVAL_TARGETS),
            rates={"lr": options.lr} | ({"matrix_lr": options.matrix_lr} if options.optimizer == "muon" else {}),
            flops_per_token=flops_per_token(self.shape, dataset.row_tokens),
            peak_flops=None if peak is None else peak * self.ranks.size,
        )
        start, seconds = self.loop.step, options.report_seconds
        return Report(self.out, run_info, start_step=start, report_seconds=seconds, tensorboard=self.tensorboard)

    def _finish(self, report: Report) -> None:
        """Evaluates the export weights and writes the result to the output directory."""
        loop, dataset = self.loop, self.dataset
        exported = loop.load_final_weights(keep_best=self.keep_best)
        print_stdout(f"measuring bits per byte of all of the {dataset.measured} text")  # of much text it takes minutes
        bits = loop.bits_per_byte_of(dataset.held_out)
        if not math.isfinite(bits):
            raise Diverged(f"the {dataset.measured} loss became {bits}", self.work)
        names = shorten_names(list(dataset.unseen))
        unseen = {n: loop.bits_per_byte_of(text) for n, text in zip(names, dataset.unseen.values(), strict=True)}
        samples = generate_samples(self.decoder, dataset.tokenizer, dataset.prompts, _SAMPLE_TOKENS, self.sampling)
        if samples:
            print_stdout("samples, each an opening and what the model makes of it:\n")
        for sample in samples:
            print_stdout(f"--- {visible(sample.full_text)}\n")
        report.finish(bits, samples)
        self._export(exported, bits, unseen, samples)
        print_stdout(f"{dataset.measured} bits per byte {bits:.4f} after {loop.step} steps, {duration(loop.seconds)}")
        for name, unseen_bits in unseen.items():
            print_stdout(f"unseen {name}: {unseen_bits:.4f} bits per byte")
        written = shlex.quote(str(self.out))
        print_stdout(f"written: {written}; look at loss.svg, samples.md and README.md in it\nserve it: {self._serve()}")

    def _export_unfinished(self) -> None:
        """Writes the best weights so far, so that the directory of an interrupted run serves. Never fails the run."""
        best, step = self.loop.best, self.loop.step
        if not step:
            return
        exported = self.loop.load_final_weights(keep_best=self.keep_best)
        bits = best.bits if best.step and (self.keep_best or best.step == step) else None
        try:
            self._export(f"{exported}; the run is unfinished", bits, {}, [])
            print_stderr(f"{self.out} can be served ({exported}): {self._serve()}")
        except CheckpointError as error:
            print_stderr(f"warning: no model was exported ({error})")

    def _serve(self) -> str:
        """Command that serves the result."""
        return shlex.join([*program_command("serve"), "--weights", str(self.out)])

    def _export(
        self, exported: str, bits: float | None, unseen: Mapping[str, float], samples: Sequence[Sample]
    ) -> None:
        """Writes a directory that the service can load. Raises CheckpointError.

        exported: description of the weights. bits: of the measured text; None if an unfinished run was not measured.
        """
        decoder, tokenizer, options = self.decoder, self.dataset.tokenizer, self.options
        dtype = getattr(torch, options.export_dtype)
        if self.base:
            files = self.base.result(decoder, dtype)
        else:
            sampling = {"do_sample": True, **asdict(self.sampling)}
            generation = sampling if self.sampling.temperature else {"do_sample": False}
            files = weights_files(decoder, dtype=dtype, eos_id=tokenizer.eos_id, generation=generation)
            files |= {name: content.encode() for name, content in tokenizer.files().items()}
        ids = tokenizer.encode(" ".join(prompt.text for prompt in self.dataset.prompts))
        # A small vocabulary may contain no word of the prompts.
        golden_prompt = (ids if len(ids) > 1 else [0, 0])[: min(MAX_PROMPT_IDS, decoder.config.context)]
        files[GOLDEN_FILE] = golden_file(as_stored(decoder, dtype), golden_prompt)
        card = model_card(
            decoder.config,
            decoder.n_params,
            family=parse_object(files["config.json"])["model_type"],
            name=options.name,
            metadata={"license": options.license, "language": options.language},
            start=f"fine-tuned from `{Path(options.init).name}`" if self.base else "trained from scratch",
            about=self.about,
            results=self._results(exported, bits, unseen, hashlib.sha256(files[WEIGHTS_FILE]).hexdigest()),
            command=self.command,
            samples=samples,
            sampling=str(self.sampling),
        )
        # Write the manifest last: until it exists, a reader of the directory sees that it is incomplete.
        manifest = manifest_file(files, options.name)
        write_files(self.out, {**files, "README.md": card.encode(), MANIFEST_FILE: manifest})

    def _results(self, exported: str, bits: float | None, unseen: Mapping[str, float], sha256: str) -> dict[str, str]:
        """Rows of the model card's table."""
        loop, dataset, options = self.loop, self.dataset, self.options
        tokens, epochs = dataset.tokens(loop.step), dataset.epochs(loop.step)
        names = ", ".join(map(plain, shorten_names(options.pairs or options.data)))
        speed = f"{tokens / max(loop.seconds, 1e-9):,.0f} tokens/s"
        return {
            "vocabulary": str(self.shape.vocab_size),
            f"{dataset.measured} bits per byte": "not measured yet" if bits is None else f"**{bits:.4f}**",
            **{f"never seen: {plain(name)}": f"{value:.4f} bits per byte" for name, value in unseen.items()},
            "corpus": f"{names}; {dataset.corpus}",
            "tokens seen": f"{tokens:,} ({epochs:.2f} epochs) in {loop.step} steps",
            "exported": exported,
            "time and device": f"{duration(loop.seconds)} on {describe(self.device)}, {speed}",
            "seed": str(options.seed),
            "date": datetime.now(UTC).date().isoformat(),
            "SHA-256 of model.safetensors": f"`{sha256}`",
        }


def _length(dataset: Dataset, limits: Limits) -> str:
    """Planned length of a run: minutes, or steps with tokens and epochs, or both."""
    share = limits.done(step=1, epochs=dataset.epochs(1), tokens=dataset.tokens(1), seconds=0.0)
    until = [] if limits.minutes is None else [f"{limits.minutes:g} minutes"]
    if share:
        most = max(1, round(1 / share))
        until.append(f"{most:,} steps, {format_count(dataset.tokens(most))} tokens, {dataset.epochs(most):.2f} epochs")
    return " or ".join(until)
