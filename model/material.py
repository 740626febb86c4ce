"""What a run learns from: its tokenizer, the batch of every step, held-out batches, and prompts to look at.

Here that of running text, read in windows; rows that stand by themselves are model/rows.py. Knows no network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model.batch import Batch, of_windows
from model.data import Order, prepare
from model.sample import Prompt
from model.tokenizer import Tokenizer
from model.vocabulary import Vocabulary

_PROMPTS = ("Once upon a time", "It was a dark and stormy night,", '"Where have you been?" she asked.')


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """Everything that training asks of its data."""

    tokenizer: Tokenizer
    batch: Callable[[int], Batch]
    """The batch of a step: a pure function of the seed and the step."""
    rows: int
    """Of a batch."""
    per_epoch: int
    """Rows that are all there is."""
    n_tokens: int
    """Training tokens."""
    row_tokens: float
    """Targets of a row, on average."""
    held_out: Sequence[Batch]
    """What the result is measured on."""
    measured: str
    """What that is, in a word before "bits per byte"."""
    corpus: str
    """What there is, in words."""
    prompts: Sequence[Prompt]
    digest: str
    """SHA-256 over the texts and the options that shaped them."""

    def tokens(self, step: int) -> int:
        """Targets seen before `step`."""
        return round(step * self.rows * self.row_tokens)

    def epochs(self, step: int) -> float:
        """How often everything was seen before `step`."""
        return step * self.rows / self.per_epoch


def of_text(
    sources: Sequence[str],
    cache: Path,
    *,
    vocabulary: Vocabulary,
    context: int,
    rows: int,
    seed: int,
    straighten: float,
) -> Material:
    """Documents behind one another, read in windows of the context. Raises DataError and TokenizerError."""
    corpus = prepare(
        sources,
        cache,
        vocab_size=vocabulary.size,
        straighten=straighten,
        kind=vocabulary.kind,
        end_token=vocabulary.end_token,
    )
    order = Order(corpus.train, length=context, windows=rows, seed=seed)
    held_out_N = torch.from_numpy(corpus.held_out.astype("int64"))
    starts = range(0, len(held_out_N) - 1, context)
    n_train, n_held_out = len(corpus.train), len(corpus.held_out)
    return Material(
        tokenizer=corpus.tokenizer,
        batch=lambda step: of_windows(torch.from_numpy(order.batch(step))),
        rows=rows,
        per_epoch=order.per_epoch,
        n_tokens=n_train,
        row_tokens=context,
        held_out=[of_windows(held_out_N[None, start : start + context + 1]) for start in starts],
        measured="held-out",
        corpus=f"{corpus.n_documents} documents, {n_train} training and {n_held_out} held-out tokens",
        prompts=[Prompt(text=text, tokens=corpus.tokenizer.encode(text)) for text in _PROMPTS],
        digest=corpus.digest,
    )
