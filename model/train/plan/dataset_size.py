"""How much there is to learn from, without tokenising it: reads all text, tokenises a sample. Writes nothing."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from model.tokenizer.tokenizer import Tokenizer
from model.train.common.console_messages import Ticker
from model.train.common.formatting import counted
from model.train.data.text_file import DataError
from model.train.data.validation_split import least_share
from model.train.data.vocabulary import Vocabulary
from model.train.setup.dataset import gather
from model.train.setup.options import sources, vocabulary

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
