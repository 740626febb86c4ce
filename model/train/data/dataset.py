"""Dataset of a run: tokenizer, training batches, held-out batches, and sample prompts.

It consists of windows of running text, or of independent examples.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.config import ConfigError
from model.presets import preset
from model.tokenizer.tokenizer import Tokenizer
from model.train.data.batch import (
    IGNORE_INDEX,
    Batch,
    StepOrder,
    batch_of_windows,
    evenly_spaced,
    pad_batch,
    shuffled_batches,
)
from model.train.data.corpus import Corpus, prepare
from model.train.data.examples import ExampleTexts, Prompt, examples_of_lines, examples_of_pairs
from model.train.data.file_kinds import has_json_lines
from model.train.data.sources import DEFAULT_TEXT_KEY, Sources
from model.train.data.token_cache import Tokens
from model.train.data.vocabulary import UNKNOWN, Vocabulary
from model.train.reporting.console import print_stderr

_PROMPTS = 4
_MEASURED_AT_ONCE = 64
_TOKENS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Training and evaluation data of a run."""

    tokenizer: Tokenizer
    batch: Callable[[int], Batch]
    """The batch of a step: a pure function of the seed and the step."""
    rows: int
    """Rows per batch."""
    per_epoch: int
    """Rows per epoch."""
    row_tokens: float
    """Mean number of targets per row."""
    held_out: Sequence[Batch]
    """Batches for evaluation."""
    measured: str
    """Name of the evaluated text, before "bits per byte": "held-out" or "training"."""
    corpus: str
    """Description of the corpus size."""
    prompts: Sequence[Prompt]
    unseen: Mapping[str, Sequence[Batch]]
    """File -> texts that are neither trained on nor held out from the same documents; evaluated at the end."""
    digest: str
    """SHA-256 over the texts and the options that shaped them."""

    def tokens(self, step: int) -> int:
        """Targets seen before `step`."""
        return round(step * self.rows * self.row_tokens)

    def bytes_per_target(self, n_targets: float) -> float:
        """Mean bytes per target of the evaluated text, or of about `n_targets` evenly spaced targets."""
        bytes_of, n_bytes, seen = self.tokenizer.bytes_of, 0, 0
        for batch in evenly_spaced(self.held_out, n_targets):
            counted = batch.targets_RN[batch.targets_RN.ne(IGNORE_INDEX)].tolist()
            n_bytes, seen = n_bytes + sum(len(bytes_of[token]) for token in counted), seen + len(counted)
        return max(n_bytes, 1) / max(seen, 1)

    def epochs(self, step: int) -> float:
        """Epochs completed before `step`."""
        return step * self.rows / self.per_epoch


def build_dataset(
    options: argparse.Namespace, context: int, cache: Path, tokenizer: Tokenizer | None = None
) -> Dataset:
    """The dataset that the flags describe. cache: folder of the token cache for running text.

    tokenizer: an existing one to use. Raises ConfigError, DataError, TokenizerError and CheckpointError.
    """
    words, read = vocabulary(options), sources(options, options.pairs or options.data)
    max_vocab_size = words.size if tokenizer is None else None
    given: dict[str, Any] = {"vocabulary": words, "held_out_share": options.held_out, "tokenizer": tokenizer}
    batch = {"rows": options.windows, "seed": options.seed}
    if options.pairs:
        return dataset_of_examples(examples_of_pairs(read, context=context, **given), max_vocab_size, **batch)
    if options.per_line:
        lines = examples_of_lines(read, context=context, from_end=options.lines_from_end, **given)
        return dataset_of_examples(lines, max_vocab_size, **batch)
    # A pretrained model knows both kinds of quotes, so the text is not changed.
    default_share = 0.5 if tokenizer is None else 0.0
    straighten = default_share if options.straighten is None else options.straighten
    unseen = sources(options, options.unseen) if options.unseen else None
    corpus = prepare(read, cache, straighten=straighten, unseen=unseen, **given)
    order = StepOrder(corpus.train, length=context, windows=options.windows, seed=options.seed)
    n_train, n_held_out, note = len(corpus.train), len(corpus.held_out), _note(corpus.tokenizer, max_vocab_size)
    return Dataset(
        tokenizer=corpus.tokenizer,
        batch=lambda step: batch_of_windows(torch.from_numpy(order.batch(step))),
        rows=options.windows,
        per_epoch=order.per_epoch,
        row_tokens=context,
        held_out=windows_of(corpus.held_out, context),
        measured="held-out",
        corpus=f"{corpus.n_documents} documents, {n_train} training and {n_held_out} held-out tokens{note}",
        prompts=_prompts(corpus, options.sample_prompt, context),
        unseen={name: windows_of(tokens, context) for name, tokens in corpus.unseen.items()},
        digest=corpus.digest,
    )


def dataset_of_examples(texts: ExampleTexts, max_vocab_size: int | None, *, rows: int, seed: int) -> Dataset:
    """Dataset of independent examples. max_vocab_size: the requested maximum, for a note if the result is smaller."""
    noun, tokenizer = texts.noun, texts.tokenizer
    train = [row.example for row in texts.rows if row.key not in texts.held_out]
    # One row of each held-out key; if nothing is held out, one row of each training key.
    found = {row.key: row for row in texts.rows if row.key in texts.held_out or not texts.held_out}
    measured = list(found.values())
    examples = [row.example for row in measured]
    n_tokens, note = sum(len(example.tokens) - 1 for example in train), _note(tokenizer, max_vocab_size)
    few = f"none, {len(measured)} {noun} are too few; bits per byte are of the training {noun}"
    held_out = f"{len(measured)} {noun}" if texts.held_out else few
    digest = hashlib.sha256("".join(tokenizer.files().values()).encode())
    for row in texts.rows:
        digest.update(repr(row.example).encode())
    return Dataset(
        tokenizer=tokenizer,
        batch=shuffled_batches(train, rows=rows, seed=seed),
        rows=rows,
        per_epoch=len(train),
        row_tokens=n_tokens / len(train),
        held_out=[pad_batch(examples[i : i + _MEASURED_AT_ONCE]) for i in range(0, len(examples), _MEASURED_AT_ONCE)],
        measured="held-out" if texts.held_out else "training",
        corpus=f"{len(texts.rows)} {noun}, {n_tokens} training tokens; held-out: {held_out}{note}",
        prompts=[row.prompt for row in measured[:_PROMPTS]],
        unseen={},
        digest=digest.hexdigest(),
    )


def vocabulary(options: argparse.Namespace) -> Vocabulary:
    """Settings of the tokenizer to train. Raises ConfigError."""
    end: str = options.end_token
    if not end or end.split() != [end] or end == UNKNOWN:
        raise ConfigError(f"--end-token must be one word other than {UNKNOWN}, not {end!r}")
    size = preset(options.preset).vocab_size if options.tokenizer == "bpe" else None
    # An explicit size that the text cannot fill is an error; a preset's size is only an upper bound.
    fewer = options.vocab_size is None
    return Vocabulary(kind=options.tokenizer, size=options.vocab_size or size, end_token=end, fewer=fewer)


def sources(options: argparse.Namespace, names: Sequence[str]) -> Sources:
    """Text sources of these names, with the flags for reading applied. Raises ConfigError and DataError."""
    if options.text_key is not None:
        read = Sources([*(options.pairs or options.data), *(options.unseen or [])], exclude=Path(options.out))
        if not any(has_json_lines(path) for path in read.paths()):
            raise ConfigError("--text-key needs .jsonl files, and the data has none: omit it")
    return Sources(names, text_key=options.text_key or DEFAULT_TEXT_KEY, exclude=Path(options.out))


def report_left_out(options: argparse.Namespace) -> None:
    """Says which files of the given folders are not read. Raises DataError."""
    names = [*(options.pairs or options.data), *(options.unseen or [])]
    for line in Sources(names, exclude=Path(options.out)).left_out():
        print_stderr(line)


def windows_of(tokens: Tokens, context: int) -> list[Batch]:
    """Batches in which every token but the first is a target once. Groups short windows; the remainder is separate."""
    tokens_N = torch.from_numpy(tokens.astype("int64"))
    n_whole = (len(tokens_N) - 1) // context
    whole_RN = tokens_N.unfold(0, context + 1, context) if n_whole else tokens_N.new_empty(0, context + 1)
    rest_RN = tokens_N[None, n_whole * context :]
    parts = whole_RN.split(max(1, _TOKENS_AT_ONCE // context))
    return [batch_of_windows(part_RN) for part_RN in (*parts, rest_RN) if len(part_RN) and part_RN.shape[1] > 1]


def _prompts(corpus: Corpus, given: Sequence[str] | None, context: int) -> list[Prompt]:
    """Prompts of samples: from --sample-prompt, or openings of held-out text. Raises ConfigError."""
    encode, most = corpus.tokenizer.encode, context // 2
    if not given:
        starts = [encode(text)[:most] for text in corpus.openings]
        return [Prompt(text=corpus.tokenizer.decode(tokens), tokens=tokens) for tokens in starts]
    prompts = [Prompt(text=text, tokens=encode(text)) for text in given]
    longest = max(len(prompt.tokens) for prompt in prompts)
    if longest > most:
        raise ConfigError(f"--sample-prompt has {longest} tokens, and half of the context of {context} is the most")
    return prompts


def _note(tokenizer: Tokenizer, max_vocab_size: int | None) -> str:
    """Says if the vocabulary is smaller than the requested maximum."""
    size = tokenizer.vocab_size
    return f"; a vocabulary of {size}, the maximum for this text" if size < (max_vocab_size or 0) else ""
