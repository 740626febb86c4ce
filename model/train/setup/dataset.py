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

from model.tokenizer.tokenizer import Tokenizer
from model.train.common.sample import Prompt
from model.train.data.batch import IGNORED, Batch, Examples, StepOrder, of_windows, padded, spread
from model.train.data.corpus import Corpus, prepare
from model.train.data.examples import ExampleTexts, of_lines, of_pairs
from model.train.data.token_cache import Tokens
from model.train.setup.options import sources, vocabulary

_PROMPTS = (
    "Once upon a time",
    "It was a dark and stormy night,",
    '"Where have you been?" she asked.',
    "\u201cI don\u2019t believe you,\u201d said the old man.",
)
_MEASURED_AT_ONCE = 64
_TOKENS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Everything that training asks of its data."""

    tokenizer: Tokenizer
    batch: Callable[[int], Batch]
    """The batch of a step: a pure function of the seed and the step."""
    rows: int
    """Of a batch."""
    per_epoch: int
    """Rows that are all there is."""
    row_tokens: float
    """Targets of a row, on average."""
    held_out: Sequence[Batch]
    """What the result is measured on."""
    measured: str
    """What that is, in a word before "bits per byte"."""
    corpus: str
    """What there is, in words."""
    prompts: Sequence[Prompt]
    unseen: Mapping[str, Sequence[Batch]]
    """By file: texts that are neither learnt from nor held out of the same books; measured at the end."""
    digest: str
    """SHA-256 over the texts and the options that shaped them."""

    def tokens(self, step: int) -> int:
        """Targets seen before `step`."""
        return round(step * self.rows * self.row_tokens)

    def bytes_per_target(self, n_targets: float) -> float:
        """Mean length of a token in what is measured, or in so many targets from all over it."""
        bytes_of, n_bytes, seen = self.tokenizer.bytes_of, 0, 0
        for batch in spread(self.held_out, n_targets):
            counted = batch.targets_RN[batch.targets_RN.ne(IGNORED)].tolist()
            n_bytes, seen = n_bytes + sum(len(bytes_of[token]) for token in counted), seen + len(counted)
        return max(n_bytes, 1) / max(seen, 1)

    def epochs(self, step: int) -> float:
        """How often everything was seen before `step`."""
        return step * self.rows / self.per_epoch


def gather(options: argparse.Namespace, context: int, cache: Path, tokenizer: Tokenizer | None = None) -> Dataset:
    """What the flags name, in the form that they name. cache: where running text keeps its tokens.

    tokenizer: one that is there already. Raises ConfigError, DataError, TokenizerError and CheckpointError.
    """
    words, read = vocabulary(options), sources(options, options.pairs or options.data)
    most_tokens = words.size if tokenizer is None else None
    given: dict[str, Any] = {"vocabulary": words, "held_out_share": options.held_out, "tokenizer": tokenizer}
    batch = {"rows": options.windows, "seed": options.seed}
    if options.pairs:
        return material_of_rows(of_pairs(read, context=context, **given), most_tokens, **batch)
    if options.per_line:
        lines = of_lines(read, context=context, from_end=options.lines_from_end, **given)
        return material_of_rows(lines, most_tokens, **batch)
    # A model that has read more than this text knows both kinds of quotes, and the text stays as it is.
    usual = 0.5 if tokenizer is None else 0.0
    straighten = usual if options.straighten is None else options.straighten
    unseen = sources(options, options.unseen) if options.unseen else None
    corpus = prepare(read, cache, straighten=straighten, unseen=unseen, **given)
    return _material_of_text(corpus, most_tokens, context=context, **batch)


def material_of_rows(texts: ExampleTexts, most_tokens: int | None, *, rows: int, seed: int) -> Dataset:
    """Texts by themselves, so many a step. most_tokens: what the vocabulary was to have at most."""
    noun, tokenizer = texts.noun, texts.tokenizer
    train = [row.example for row in texts.found if row.key not in texts.held_out]
    # One row of each key, be it held out or, where nothing is, learnt from.
    found = {row.key: row for row in texts.found if row.key in texts.held_out or not texts.held_out}
    measured = list(found.values())
    examples = [row.example for row in measured]
    n_tokens, n_words = sum(len(example.tokens) - 1 for example in train), tokenizer.vocab_size
    short = f"{_shrunk(n_words)}; " if n_words < (most_tokens or 0) else ""
    few = f"none, {len(measured)} {noun} are too few; bits per byte are of the training {noun}"
    held_out = f"{len(measured)} {noun}" if texts.held_out else few
    return Dataset(
        tokenizer=tokenizer,
        batch=Examples(train, rows=rows, seed=seed).batch,
        rows=rows,
        per_epoch=len(train),
        row_tokens=n_tokens / len(train),
        held_out=[padded(examples[i : i + _MEASURED_AT_ONCE]) for i in range(0, len(examples), _MEASURED_AT_ONCE)],
        measured="held-out" if texts.held_out else "training",
        corpus=f"{len(texts.found)} {noun}, {n_tokens} training tokens; {short}held-out: {held_out}",
        prompts=[row.prompt for row in measured[: len(_PROMPTS)]],
        unseen={},
        digest=_digest(texts),
    )


def _material_of_text(corpus: Corpus, most_tokens: int | None, *, context: int, rows: int, seed: int) -> Dataset:
    """Documents behind one another, read in windows of the context."""
    order = StepOrder(corpus.train, length=context, windows=rows, seed=seed)
    n_train, n_held_out, n_words = len(corpus.train), len(corpus.held_out), corpus.tokenizer.vocab_size
    short = f"; {_shrunk(n_words)}" if n_words < (most_tokens or 0) else ""
    return Dataset(
        tokenizer=corpus.tokenizer,
        batch=lambda step: of_windows(torch.from_numpy(order.batch(step))),
        rows=rows,
        per_epoch=order.per_epoch,
        row_tokens=context,
        held_out=_windows(corpus.held_out, context),
        measured="held-out",
        corpus=f"{corpus.n_documents} documents, {n_train} training and {n_held_out} held-out tokens{short}",
        prompts=[Prompt(text=text, tokens=corpus.tokenizer.encode(text)) for text in _PROMPTS],
        unseen={name: _windows(tokens, context) for name, tokens in corpus.unseen.items()},
        digest=corpus.digest,
    )


def _shrunk(n_words: int) -> str:
    return f"a vocabulary of {n_words}, the text supports no more"


def _windows(tokens: Tokens, context: int) -> list[Batch]:
    """Every token but the first is a target once. Short windows are measured together, what is left over alone."""
    tokens_N = torch.from_numpy(tokens.astype("int64"))
    n_whole = (len(tokens_N) - 1) // context
    whole_RN = tokens_N.unfold(0, context + 1, context) if n_whole else tokens_N.new_empty(0, context + 1)
    rest_RN = tokens_N[None, n_whole * context :]
    parts = whole_RN.split(max(1, _TOKENS_AT_ONCE // context))
    return [of_windows(part_RN) for part_RN in (*parts, rest_RN) if len(part_RN) and part_RN.shape[1] > 1]


def _digest(texts: ExampleTexts) -> str:
    digest = hashlib.sha256("".join(texts.tokenizer.files().values()).encode())
    for row in texts.found:
        digest.update(repr(row.example).encode())
    return digest.hexdigest()
