"""Estimates of a run for --dry-run and --preset auto, from the text and a few timed micro-batches."""

from __future__ import annotations

import argparse
import math
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from model.checkpoint.model_summary import describe_bytes, describe_size
from model.command_line import AUTO
from model.config import ConfigError, ModelConfig
from model.device import choose_device, describe, free_memory
from model.files import STATE_FOLDER, write_file
from model.nn.transformer import Decoder
from model.presets import SIZES
from model.train.data.batch import Batch, batch_of_windows
from model.train.data.dataset import build_dataset, report_left_out, sources
from model.train.data.sources import STANDARD_INPUT
from model.train.finetune import apply_base_defaults, load_base
from model.train.options import limits, shape
from model.train.output_dir import free_bytes
from model.train.reporting.console import duration, format_count, print_stdout
from model.train.resources import flops_per_token, meta_decoder, require_memory, sizes
from model.train.step.trainer import build_trainer

_REPEATS = 3
_TOKENS_PER_PARAMETER = 5
"""Minimum training tokens per parameter. 20 are compute-optimal (arXiv:2203.15556), but a model slightly too large
costs less than one slightly too small: `small` reached 1.46 held-out bits per byte with 2."""
_BYTES_PER_TOKEN_BIT = 0.31
"""Bytes of a token for each bit of its id. English novels (2026-11-28): 2.85 bytes at a vocabulary of 1,024, 3.81 at
4,096, 4.19 at 8,192, 4.43 at 16,384."""
_MAX_EPOCHS = 8
"""Useful epochs: up to 4 are as good as new text, beyond 16 there is little gain (arXiv:2305.16264)."""


def resolve_preset(options: argparse.Namespace, *, follows: bool = False) -> None:
    """Replaces --preset auto with a preset and prints it; a resumed run keeps its preset.

    follows: use the choice of another process of this run. Raises ConfigError, DataError and TokenizerError.
    """
    if options.preset != AUTO:
        return
    kept = Path(options.out) / STATE_FOLDER / "preset"
    if (options.resume or follows) and kept.exists():
        options.preset = kept.read_text().strip()
        return
    # Errors in the other flags are reported before the text is read.
    if options.pairs or options.per_line:
        raise ConfigError("--preset auto needs running text; choose a preset for lines and pairs")
    if str(STANDARD_INPUT) in (options.data or []):
        raise ConfigError("--preset auto reads the text twice, and - can be read only once; choose a preset")
    shape(_with_preset(options, SIZES[0]))
    n_bytes = sum(len(text) for _, text in sources(options, options.data).documents())
    options.preset, why = choose_preset(options, n_bytes)
    print_stdout(f"--preset auto takes {options.preset}: {why}")
    if not options.dry_run:
        write_file(kept, f"{options.preset}\n".encode())


def choose_preset(options: argparse.Namespace, n_bytes: int) -> tuple[str, str]:
    """(the largest preset with enough training tokens per parameter, reason). n_bytes: size of the text."""
    chosen, why = SIZES[0], "the smallest"
    for name in SIZES:
        candidate = _with_preset(options, name)
        config = shape(candidate)
        text_tokens = n_bytes / (_BYTES_PER_TOKEN_BIT * math.log2(config.vocab_size))
        n_params = meta_decoder(config).n_params
        wanted = _TOKENS_PER_PARAMETER * n_params
        amounts = {
            f"{_MAX_EPOCHS} epochs of this text": _MAX_EPOCHS * text_tokens,
            "this run": _run_tokens(candidate, config, text_tokens),
        }
        for source, most in amounts.items():
            if most < wanted:
                few = f"{name} wants {format_count(wanted)} tokens or more, {source} has {format_count(most)}"
                return chosen, f"{why}; {few}"
        chosen, why = name, f"{describe_size(n_params)} parameters with {_TOKENS_PER_PARAMETER} tokens or more for each"
    return chosen, f"{why}; the largest"


def forecast(options: argparse.Namespace) -> None:
    """Prints a table of the estimates, line by line. Raises ValueError if the run does not fit."""
    device, base = choose_device(options.device), load_base(options, Path(options.out), resumes=False)
    if base:
        apply_base_defaults(options, base)
    config = base.shape if base else shape(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes the folder, as SIGINT does
    with TemporaryDirectory() as cache:
        context, tokenizer = options.context or config.context, base.tokenizer if base else None
        dataset = build_dataset(options, context, Path(cache), tokenizer)
        report_left_out(options)
        tokens = sum(path.stat().st_size for path in Path(cache).glob("*/*.bin"))
    config = config if base else replace(config, vocab_size=dataset.tokenizer.vocab_size)
    decoder = meta_decoder(config)
    need = sizes(decoder, options.optimizer, ema=options.ema, export_dtype=options.export_dtype)
    _print("parameters", describe_size(decoder.n_params))
    _print("one token", f"{flops_per_token(config, dataset.row_tokens) / 1e6:,.4g} MFLOP, forward and backward")
    _print("text", dataset.corpus)
    on_disk, free = need.on_disk + tokens, free_bytes(Path(options.out))
    files = f"tokens {describe_bytes(tokens)}, snapshots {describe_bytes(2 * need.in_memory)}"
    result = f"result {describe_bytes(need.result)}"
    _print("disk", f"about {describe_bytes(on_disk)}: {files}, {result}; {describe_bytes(free)} are free")
    if on_disk > free:
        raise ValueError(f"--out {options.out}: not enough disk space; use another disk")
    free = free_memory(device)
    require_memory(need.in_memory, free)
    seconds = measure(config, options, device, dataset.batch(0))
    on_cuda = device.type == "cuda"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else 1024 * usage.ru_maxrss
    _print("memory", f"about {describe_bytes(peak)}, the most that this took; {describe_bytes(free)} are free")
    share = limits(options).done(step=1, epochs=dataset.epochs(1), tokens=dataset.tokens(1), seconds=seconds)
    steps = math.ceil(1 / share - 1e-6)
    length = f"{format_count(dataset.tokens(steps))} tokens, {dataset.epochs(steps):.2f} epochs"
    _print("steps", f"{steps} of {dataset.tokens(1)} tokens: {length}")
    _print(
        "speed", f"{dataset.tokens(1) / seconds:.0f} tokens/s on {describe(device)}, measured on a few micro-batches"
    )
    _print("time", f"about {duration(steps * seconds)}, plus evaluation and saving")
    print_stdout("it fits; nothing was written. Start it without --dry-run")


def measure(config: ModelConfig, options: argparse.Namespace, device: torch.device, batch: Batch) -> float:
    """Seconds of a step of a new decoder on this batch, from a few micro-batches after a warm-up."""
    trainer = build_trainer(Decoder(config).initialize(0).to(device), options, device)
    part = batch.split(trainer.micro_batch_rows(batch) * trainer.workers)[0]  # as in a run, one for each thread
    trainer.gradients(part)
    trainer.update(0, 0.0)
    of_rows = _seconds(lambda: trainer.gradients(part), device)
    of_update = _seconds(lambda: trainer.update(0, 0.0), device, before=lambda: trainer.gradients(part))
    return of_rows * len(batch.inputs_RN) / len(part.inputs_RN) + of_update


def _seconds(work: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None) -> float:
    """The minimum of a few measurements: other load on the machine only adds time."""
    measured = []
    for _ in range(_REPEATS):
        before()
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        measured.append(time.perf_counter() - started)
    return min(measured)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _with_preset(options: argparse.Namespace, name: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "preset": name})


def _run_tokens(options: argparse.Namespace, config: ModelConfig, text_tokens: float) -> float:
    """Tokens of the whole run, according to its limits. text_tokens: tokens of the text."""
    step: int = options.windows * config.context
    seconds = 0.0
    if options.max_minutes:
        tokens_RN = torch.randint(config.vocab_size, (options.windows, config.context + 1))
        seconds = measure(config, options, choose_device(options.device), batch_of_windows(tokens_RN))
    return float(step / limits(options).done(step=1, epochs=step / text_tokens, tokens=step, seconds=seconds))


def _print(what: str, text: str) -> None:
    print_stdout(f"{what:11} {text}")
