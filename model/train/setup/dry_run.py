"""Predicts what a run takes: --dry-run and --preset auto. Measures the text without tokenizing all of it."""

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
from model.train.common.console import Ticker, counted, duration
from model.train.common.output_dir import free_bytes
from model.train.data.corpus import least_share
from model.train.data.sources import STANDARD_INPUT, DataError
from model.train.data.vocabulary import Vocabulary
from model.train.setup.dataset import gather
from model.train.setup.finetune import base_of, settle
from model.train.setup.options import limits, shape, sources, vocabulary
from model.train.setup.resources import Speed, measure, sizes

_SAMPLE = 1_000_000
"""Bytes, of which a vocabulary is learnt in a second or two."""
_PIECE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """What a corpus is, about."""

    told: str
    """In words."""
    row_tokens: float
    per_epoch: int
    """Rows."""
    vocab_size: int
    stored: int
    """Bytes of the tokens on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What was read: how much, and a part of it from all over."""

    n_documents: int
    n_bytes: int
    sample: list[str]

    def tokenised(self, words: Vocabulary, given: Tokenizer | None = None) -> tuple[float, int]:
        """(bytes of a token, tokens of the vocabulary) where the sample speaks for the whole. Raises TokenizerError."""
        # A sample may be too small for what the whole is large enough for.
        tokenizer = given or replace(words, fewer=words.fewer or self.n_bytes > _SAMPLE).train(self.sample)
        n_tokens = sum(map(len, tokenizer.encode_many(self.sample)))
        is_whole = self.n_bytes <= _SAMPLE or words.size is None or given
        return (
            sum(len(text.encode()) for text in self.sample) / max(n_tokens, 1),
            tokenizer.vocab_size if is_whole else words.size or 0,
        )


def read_texts(options: argparse.Namespace) -> Texts:
    """All running text once, from beginning to end. Raises DataError."""
    ticker, sample, every, n_pieces, n_documents, n_bytes = Ticker(), list[str](), 1, 0, 0, 0
    for path, text in sources(options, options.data).documents():
        for start in range(0, len(text), _PIECE):
            if n_pieces % every == 0:
                sample.append(text[start : start + _PIECE].decode(errors="ignore"))  # half a character at either end
            n_pieces += 1
        while sum(map(len, sample)) > 2 * _SAMPLE:
            sample, every = sample[::2], 2 * every
        n_documents, n_bytes = n_documents + 1, n_bytes + len(text)
        ticker.tick(f"reading: {n_bytes / 1e6:.0f} MB, {n_documents} documents, now {path}")
    return Texts(n_documents=n_documents, n_bytes=n_bytes, sample=sample)


def amount_of(options: argparse.Namespace, context: int, tokenizer: Tokenizer | None = None) -> Amount:
    """What the flags name. tokenizer: one that is there already. Raises ConfigError, DataError and TokenizerError."""
    if options.pairs or options.per_line:
        rows = gather(options, context, Path(options.out), tokenizer)
        return Amount(
            told=rows.corpus,
            row_tokens=rows.row_tokens,
            per_epoch=rows.per_epoch,
            vocab_size=rows.tokenizer.vocab_size,
            stored=0,
        )
    texts, words = read_texts(options), vocabulary(options)
    per_token, vocab_size = texts.tokenised(words, tokenizer)
    all_tokens = round(texts.n_bytes / per_token) + texts.n_documents
    n_tokens = round(all_tokens * (1 - least_share(texts.n_documents, options.held_out)))
    per_epoch = (n_tokens - 1) // context - 1
    if per_epoch < 1:
        raise DataError(f"about {n_tokens} tokens of training text are too few for windows of {context} (--context)")
    told = (
        f"{texts.n_documents} documents, {texts.n_bytes / 1e6:.1f} MB; about {counted(n_tokens)} training tokens "
        f"of {per_token:.2f} bytes"
    )
    return Amount(
        told=told,
        row_tokens=context,
        per_epoch=per_epoch,
        vocab_size=vocab_size,
        stored=(2 if vocab_size <= 2**16 else 4) * all_tokens,
    )


_PASSING = 2
"""Gradients of activations, and what a layer needs only while it computes, are about as much again."""
_PARTS = {
    "embedding": "embedding",
    "position_embedding": "embedding",
    "attention": "attention",
    "cross": "attention",
    "mlp": "feed-forward",
    "untied_head": "head",
    "head_bias": "head",
}
_REST = "norms"
_PER_PARAMETER = 5
"""Tokens that a parameter should at least see. 20 make the most of an amount of computing (arXiv:2203.15556), but a
little too large costs less than a little too small: `small` was at 1.46 held-out bits per byte after 2 of them."""
_EPOCHS = 8
"""How often a text is worth reading: 4 times are as good as new text, 16 teach little more (arXiv:2305.16264)."""


def settle_size(options: argparse.Namespace, *, follows: bool = False) -> None:
    """Puts a size in the place of auto, and says which; of a run that goes on the one that it has.

    follows: take what another process of this run has chosen. Raises ConfigError, DataError and TokenizerError.
    """
    if options.preset != AUTO:
        return
    kept = Path(options.out) / ".training" / "preset"
    if (options.resume or follows) and kept.exists():
        options.preset = kept.read_text().strip()
        return
    # Errors in the other flags are reported before the text is read.
    if options.pairs or options.per_line:
        raise ConfigError("--preset auto is for running text; name a preset for lines and pairs")
    if str(STANDARD_INPUT) in (options.data or []):
        raise ConfigError("--preset auto reads the text before it chooses, and - can be read but once; name a preset")
    shape(_with_preset(options, SIZES[0]))
    options.preset, why = choose(options, read_texts(options))
    print(f"--preset auto takes {options.preset}: {why}", flush=True)
    if not options.dry_run:
        write_file(kept, f"{options.preset}\n".encode())


def choose(options: argparse.Namespace, texts: Texts) -> tuple[str, str]:
    """(the largest preset of which every parameter would see enough tokens, why it is)."""
    chosen, why = SIZES[0], "the smallest there is"
    for name in SIZES:
        asked = _with_preset(options, name)
        config, once = shape(asked), texts.n_bytes / texts.tokenised(vocabulary(asked))[0]
        with torch.device("meta"):
            n_params = Decoder(config).n_params
        wanted = _PER_PARAMETER * n_params
        amounts = {f"{_EPOCHS} epochs of this text": _EPOCHS * once, "this run": _length(asked, config, once)}
        for whence, most in amounts.items():
            if most < wanted:
                return chosen, f"{why}; {name} wants {counted(wanted)} tokens or more, {whence} has {counted(most)}"
        chosen, why = name, f"{describe_size(n_params)} parameters, each to see {_PER_PARAMETER} tokens or more"
    return chosen, f"{why}; the largest there is"


def forecast(options: argparse.Namespace) -> None:
    """Prints a table, a line as soon as it is known. Raises ValueError behind it where it does not fit."""
    device, base = choose_device(options.device), base_of(options, Path(options.out), resumes=False)
    if base:
        settle(options, base)
    asked = base.shape if base else shape(options)
    amount = amount_of(options, options.context or asked.context, base.tokenizer if base else None)
    asked = asked if base else replace(asked, vocab_size=amount.vocab_size)
    with torch.device("meta"):
        decoder = Decoder(asked)
    need = sizes(decoder, options.optimizer, ema=options.ema, export_dtype=options.export_dtype)
    listed = ", ".join(f"{name} {describe_size(n)}" for name, n in parts(decoder).items())
    _print("parameters", f"{describe_size(decoder.n_params)}: {listed}")
    _print("text", amount.told)
    on_disk, free = need.on_disk + amount.stored, free_bytes(Path(options.out))
    files = _listed(tokens=amount.stored, snapshots=2 * need.snapshot, result=need.result)
    _print("disk", f"about {describe_bytes(on_disk)}: {files}; {describe_bytes(free)} are free")
    if on_disk > free:
        raise ValueError(f"--out {options.out}: its disk has too little room; name a folder elsewhere")
    in_memory, free = need.in_memory, free_memory(device)
    told = _listed(weights=need.weights, gradients=need.weights, optimiser=need.optimiser, average=need.average)
    if in_memory < free:
        speed = measure(asked, options, device, math.ceil(amount.row_tokens))
        _print_run(options, amount, speed, device)
        in_memory += _PASSING * speed.activations
        told += f", activations of {speed.micro_rows} windows at once {describe_bytes(speed.activations)}"
    _print("memory", f"about {describe_bytes(in_memory)}: {told}; {describe_bytes(free)} are free")
    if in_memory > free:
        raise ValueError("there is too little memory; take a smaller --preset, --context or --micro-windows")
    print("it fits; nothing was written. Without --dry-run it begins", flush=True)


def steps_of(options: argparse.Namespace, amount: Amount, step_seconds: float) -> int:
    """Until the first of the limits is reached."""
    rows = options.windows
    epochs, tokens = rows / amount.per_epoch, rows * amount.row_tokens
    share = limits(options).done(step=1, epochs=epochs, tokens=tokens, seconds=step_seconds)
    return math.ceil(1 / share - 1e-6)


def parts(decoder: Decoder) -> dict[str, int]:
    """Parameters by what they belong to, the norms last."""
    found = dict.fromkeys((*_PARTS.values(), _REST), 0)
    for name, parameter in decoder.named_parameters():
        first, *_, third = [*name.split("."), "", ""][:3]
        found[_PARTS.get(third if first.endswith("blocks") else first, _REST)] += parameter.numel()
    return {name: n for name, n in found.items() if n}


def _with_preset(options: argparse.Namespace, name: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(options), "preset": name})


def _length(options: argparse.Namespace, config: ModelConfig, once: float) -> float:
    """Tokens of the whole run, as its limits have it. once: tokens of the text."""
    step: int = options.windows * config.context
    seconds = 0.0
    if options.max_minutes:
        speed = measure(config, options, choose_device(options.device), config.context)
        seconds = speed.step_seconds(options.windows)
    return step / limits(options).done(step=1, epochs=step / once, tokens=step, seconds=seconds)


def _print_run(options: argparse.Namespace, amount: Amount, speed: Speed, device: torch.device) -> None:
    seconds = speed.step_seconds(options.windows)
    steps, per_step = steps_of(options, amount, seconds), round(options.windows * amount.row_tokens)
    epochs = steps * options.windows / amount.per_epoch
    _print("steps", f"{steps} of {per_step} tokens: {counted(steps * per_step)} tokens, {epochs:.2f} epochs")
    _print("speed", f"{per_step / seconds:.0f} tokens/s on {describe(device)}, as a few micro-batches went")
    _print("time", f"about {duration(steps * seconds)}, and what measuring and saving take")


def _print(what: str, text: str) -> None:
    print(f"{what:11} {text}", flush=True)


def _listed(**sizes: int) -> str:
    return ", ".join(f"{what} {describe_bytes(size)}" for what, size in sizes.items() if size)
