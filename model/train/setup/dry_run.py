"""Estimates the resources of a run, for --dry-run and --preset auto. Tokenizes only a sample of the text."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from model.checkpoint.model_summary import describe_bytes, describe_size
from model.command_line import AUTO
from model.config import ConfigError, ModelConfig
from model.device import choose_device, describe, free_memory
from model.files import write_file
from model.nn.transformer import Decoder
from model.presets import SIZES
from model.tokenizer.tokenizer import Tokenizer
from model.train.common.console import Ticker, duration, format_count
from model.train.common.output_dir import free_bytes
from model.train.data.corpus import min_held_out_fraction
from model.train.data.sources import STANDARD_INPUT, DataError
from model.train.data.vocabulary import Vocabulary
from model.train.setup.dataset import build_dataset
from model.train.setup.finetune import apply_base_defaults, load_base
from model.train.setup.options import limits, shape, sources, vocabulary
from model.train.setup.resources import Speed, measure, sizes

_SAMPLE = 1_000_000
"""In bytes; training a vocabulary on this much takes one or two seconds."""
_PIECE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSize:
    """Estimated size of a dataset."""

    description: str
    row_tokens: float
    per_epoch: int
    """Rows per epoch."""
    vocab_size: int
    stored: int
    """Bytes of the token cache on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample:
    """Size of the text, and an evenly spaced sample of it."""

    n_documents: int
    n_bytes: int
    sample: list[str]

    def measure_tokens(self, words: Vocabulary, given: Tokenizer | None = None) -> tuple[float, int]:
        """(bytes per token, vocabulary size), estimated from the sample. Raises TokenizerError."""
        # The sample may support fewer tokens than the whole text.
        tokenizer = given or replace(words, fewer=words.fewer or self.n_bytes > _SAMPLE).train(self.sample)
        n_tokens = sum(map(len, tokenizer.encode_many(self.sample)))
        is_complete = self.n_bytes <= _SAMPLE or words.size is None or given
        return (
            sum(len(text.encode()) for text in self.sample) / max(n_tokens, 1),
            tokenizer.vocab_size if is_complete else words.size or 0,
        )


def read_texts(options: argparse.Namespace) -> TextSample:
    """Reads all running text once. Raises DataError."""
    ticker, sample, every, n_pieces, n_documents, n_bytes = Ticker(), list[str](), 1, 0, 0, 0
    for path, text in sources(options, options.data).documents():
        for start in range(0, len(text), _PIECE):
            if n_pieces % every == 0:
                sample.append(text[start : start + _PIECE].decode(errors="ignore"))  # drops partial characters
            n_pieces += 1
        while sum(map(len, sample)) > 2 * _SAMPLE:
            sample, every = sample[::2], 2 * every
        n_documents, n_bytes = n_documents + 1, n_bytes + len(text)
        ticker.tick(f"reading: {n_bytes / 1e6:.0f} MB, {n_documents} documents, now {path}")
    return TextSample(n_documents=n_documents, n_bytes=n_bytes, sample=sample)


def estimate_dataset_size(options: argparse.Namespace, context: int, tokenizer: Tokenizer | None = None) -> DatasetSize:
    """Estimates the size of the data. tokenizer: an existing one. Raises ConfigError, DataError and TokenizerError."""
    if options.pairs or options.per_line:
        rows = build_dataset(options, context, Path(options.out), tokenizer)
        return DatasetSize(
            description=rows.corpus,
            row_tokens=rows.row_tokens,
            per_epoch=rows.per_epoch,
            vocab_size=rows.tokenizer.vocab_size,
            stored=0,
        )
    texts, words = read_texts(options), vocabulary(options)
    per_token, vocab_size = texts.measure_tokens(words, tokenizer)
    all_tokens = round(texts.n_bytes / per_token) + texts.n_documents
    n_tokens = round(all_tokens * (1 - min_held_out_fraction(texts.n_documents, options.held_out)))
    per_epoch = (n_tokens - 1) // context - 1
    if per_epoch < 1:
        raise DataError(f"about {n_tokens} tokens of training text are too few for windows of {context} (--context)")
    description = (
        f"{texts.n_documents} documents, {texts.n_bytes / 1e6:.1f} MB; about {format_count(n_tokens)} training tokens "
        f"of {per_token:.2f} bytes"
    )
    return DatasetSize(
        description=description,
        row_tokens=context,
        per_epoch=per_epoch,
        vocab_size=vocab_size,
        stored=(2 if vocab_size <= 2**16 else 4) * all_tokens,
    )


_ACTIVATION_FACTOR = 2
"""Gradients of activations and temporaries of a layer take about as much memory again."""
_TOKENS_PER_PARAMETER = 5
"""Minimum training tokens per parameter. 20 are compute-optimal (arXiv:2203.15556), but a model slightly too large
costs less than one slightly too small: `small` reached 1.46 held-out bits per byte with 2."""
_MAX_EPOCHS = 8
"""Useful epochs: up to 4 are as good as new text, beyond 16 there is little gain (arXiv:2305.16264)."""


def resolve_preset(options: argparse.Namespace, *, follows: bool = False) -> None:
    """Replaces --preset auto with a preset and prints it; a resumed run keeps its preset.

    follows: use the choice of another process of this run. Raises ConfigError, DataError and TokenizerError.
    """
    if options.preset != AUTO:
        return
    kept = Path(options.out) / ".training" / "preset"
    if (options.resume or follows) and kept.exists():
        options.preset = kept.read_text().strip()
        return
    # Errors in the other flags are reported before the text is read.
    if options.pairs or options.per_line:
        raise ConfigError("--preset auto needs running text; choose a preset for lines and pairs")
    if str(STANDARD_INPUT) in (options.data or []):
        raise ConfigError("--preset auto reads the text twice, and - can be read only once; choose a preset")
    shape(_with_preset(options, SIZES[0]))
    options.preset, why = choose_preset(options, read_texts(options))
    print(f"--preset auto takes {options.preset}: {why}", flush=True)
    if not options.dry_run:
        write_file(kept, f"{options.preset}\n".encode())


def choose_preset(options: argparse.Namespace, texts: TextSample) -> tuple[str, str]:
    """(the largest preset with enough training tokens per parameter, reason)."""
    chosen, why = SIZES[0], "the smallest"
    for name in SIZES:
        candidate = _with_preset(options, name)
        config, text_tokens = shape(candidate), texts.n_bytes / texts.measure_tokens(vocabulary(candidate))[0]
        with torch.device("meta"):
            n_params = Decoder(config).n_params
        wanted = _TOKENS_PER_PARAMETER * n_params
        amounts = {
            f"{_MAX_EPOCHS} epochs of this text": _MAX_EPOCHS * text_tokens,
            "this run": _run_tokens(candidate, config, text_tokens),
        }
        for source, most in amounts.items():
            if most < wanted:
                return (
                    chosen,
                    f"{why}; {name} wants {format_count(wanted)} tokens or more, {source} has {format_count(most)}",
                )
        chosen, why = name, f"{describe_size(n_params)} parameters with {_TOKENS_PER_PARAMETER} tokens or more for each"
    return chosen, f"{why}; the largest"


def forecast(options: argparse.Namespace) -> None:
    """Prints a table of the estimates, line by line. Raises ValueError at the end if the run does not fit."""
    device, base = choose_device(options.device), load_base(options, Path(options.out), resumes=False)
    if base:
        apply_base_defaults(options, base)
    config = base.shape if base else shape(options)
    dataset_size = estimate_dataset_size(options, options.context or config.context, base.tokenizer if base else None)
    config = config if base else replace(config, vocab_size=dataset_size.vocab_size)
    with torch.device("meta"):
        decoder = Decoder(config)
    need = sizes(decoder, options.optimizer, ema=options.ema, export_dtype=options.export_dtype)
    _print("parameters", describe_size(decoder.n_params))
    _print("text", dataset_size.description)
    on_disk, free = need.on_disk + dataset_size.stored, free_bytes(Path(options.out))
    files = _format_sizes(tokens=dataset_size.stored, snapshots=2 * need.snapshot, result=need.result)
    _print("disk", f"about {describe_bytes(on_disk)}: {files}; {describe_bytes(free)} are free")
    if on_disk > free:
        raise ValueError(f"--out {options.out}: not enough disk space; use another disk")
    in_memory, free = need.in_memory, free_memory(device)
    memory_parts = _format_sizes(
        weights=need.weights, gradients=need.weights, optimizer=need.optimizer, average=need.average
    )
    if in_memory < free:
        speed = measure(config, options, device, math.ceil(dataset_size.row_tokens))
        _print_run(options, dataset_size, speed, device)
        in_memory += _ACTIVATION_FACTOR * speed.activations
        memory_parts += f", activations of {speed.micro_rows} windows at once {describe_bytes(speed.activations)}"
    _print("memory", f"about {describe_bytes(in_memory)}: {memory_parts}; {describe_bytes(free)} are free")
    if in_memory > free:
        raise ValueError("not enough memory; use a smaller --preset, --context or --micro-windows")
    print("it fits; nothing was written. Start it without --dry-run", flush=True)


def count_steps(options: argparse.Namespace, dataset_size: DatasetSize, step_seconds: float) -> int:
    """Number of steps until the first limit is reached."""
    rows = options.windows
    epochs, tokens = rows / dataset_size.per_epoch, rows * dataset_size.row_tokens
    share = limits(options).done(step=1, epochs=epochs, tokens=tokens, seconds=step_seconds)
    return math.ceil(1 / share - 1e-6)


def _with_preset(options: argparse.Namespace, name: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "preset": name})


def _run_tokens(options: argparse.Namespace, config: ModelConfig, text_tokens: float) -> float:
    """Tokens of the whole run, according to its limits. text_tokens: tokens of the text."""
    step: int = options.windows * config.context
    seconds = 0.0
    if options.max_minutes:
        speed = measure(config, options, choose_device(options.device), config.context)
        seconds = speed.step_seconds(options.windows)
    return step / limits(options).done(step=1, epochs=step / text_tokens, tokens=step, seconds=seconds)


def _print_run(options: argparse.Namespace, dataset_size: DatasetSize, speed: Speed, device: torch.device) -> None:
    seconds = speed.step_seconds(options.windows)
    steps, per_step = count_steps(options, dataset_size, seconds), round(options.windows * dataset_size.row_tokens)
    epochs = steps * options.windows / dataset_size.per_epoch
    _print("steps", f"{steps} of {per_step} tokens: {format_count(steps * per_step)} tokens, {epochs:.2f} epochs")
    _print("speed", f"{per_step / seconds:.0f} tokens/s on {describe(device)}, measured on a few micro-batches")
    _print("time", f"about {duration(steps * seconds)}, plus evaluation and saving")


def _print(what: str, text: str) -> None:
    print(f"{what:11} {text}", flush=True)


def _format_sizes(**sizes: int) -> str:
    return ", ".join(f"{what} {describe_bytes(size)}" for what, size in sizes.items() if size)
