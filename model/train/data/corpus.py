"""Documents to token windows: tokenising into a cache, and the order of training. Knows no network."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model.tokenizer.tokenizer import SPLIT, Tokenizer
from model.train.common.console_messages import Ticker
from model.train.data.sources import Sources
from model.train.data.text_file import DataError
from model.train.data.token_cache import TokenCache, Tokens, encode, pieces
from model.train.data.validation_split import Document, document_key, fraction, split_documents, straight
from model.train.data.vocabulary import Vocabulary

_TOKENIZER_CHARACTERS = 40_000_000
_SHORTEST_LEAK = 200
"""Bytes: "THE END" may well stand in two books."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokenised text, held-out documents apart. Documents stand behind one another, each after a separator."""

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    n_documents: int
    digest: str
    """SHA-256 over the documents and the options that shaped them."""
    unseen: Mapping[str, Tokens]
    """Texts by their file of which training sees nothing."""


def prepare(
    sources: Sources,
    cache: Path,
    *,
    vocabulary: Vocabulary,
    straighten: float,
    held_out_share: float = 0.01,
    unseen: Sources | None = None,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Reads, trains the tokenizer, tokenises; takes tokenizer and tokens from `cache` where the inputs are the same.

    straighten: share of the documents in which curly quotes and long dashes become ASCII, as people type them.
    tokenizer: one that is there already. Raises DataError, TokenizerError and CheckpointError.
    """
    documents = _read(sources, straighten)
    apart = _read_apart(unseen, straighten, {document.key for document in documents}) if unseen else {}
    n_documents, stored = len(documents), TokenCache(cache, _digest(documents, vocabulary, held_out_share, tokenizer))
    held_out, train = split_documents(documents, held_out_share)
    del documents  # of a single one, its training part is a copy
    if not stored.is_whole():
        made = tokenizer or vocabulary.train(_sample(train))
        stored.write(made, {"held_out": held_out, "train": train})
    stored.keep()
    used = tokenizer or Tokenizer.load(stored.folder)
    return Corpus(
        tokenizer=used,
        train=stored.read("train", used),
        held_out=stored.read("held_out", used),
        n_documents=n_documents,
        digest=stored.key,
        unseen={name: np.concatenate(list(encode(used, texts))) for name, texts in apart.items()},
    )


def _read(sources: Sources, share: float) -> list[Document]:
    """All documents, such a share of them with straight quotes. Copies differ where the share allows it."""
    documents: list[Document] = []
    copies: Counter[bytes] = Counter()
    ticker, size = Ticker(), 0
    for path, read in sources.documents():
        digest = hashlib.sha256(read).digest()
        typed = (fraction(digest) + copies[digest] / 2) % 1.0 < share
        copies[digest] += 1
        documents.append(Document(straight(read) if typed else read, document_key(read)))
        size += len(read)
        ticker.tick(f"reading: {size / 1e6:.0f} MB, {len(documents)} documents, now {path}")
    return documents


def _read_apart(unseen: Sources, share: float, learnt: set[bytes]) -> dict[str, list[bytes]]:
    """Documents by their file. Raises DataError where one of them is also learnt from."""
    found: dict[str, list[bytes]] = {}
    for path in unseen.paths():
        documents = _read(replace(unseen, names=[str(path)]), share)
        leaked = [document for document in documents if document.key in learnt]
        if len(leaked) == len(documents) or any(len(document.text) >= _SHORTEST_LEAK for document in leaked):
            raise DataError(
                f"--unseen {path}: {len(leaked)} of its {len(documents)} documents also stand in --data; "
                "take them out of one of the two"
            )
        found[str(path)] = [document.text for document in documents]
    return found


def _digest(documents: list[Document], vocabulary: Vocabulary, share: float, tokenizer: Tokenizer | None) -> str:
    # Whether fewer tokens would do decides between a tokenizer and an error, not between two tokenizers.
    made_by = replace(vocabulary, fewer=False) if tokenizer is None else sorted(tokenizer.files().items())
    digest = hashlib.sha256(f"{made_by}/{share}/{_TOKENIZER_CHARACTERS}/{SPLIT}".encode())
    for document in documents:
        digest.update(hashlib.sha256(document.text).digest())
    return digest.hexdigest()


def _sample(documents: list[bytes]) -> list[str]:
    """What a tokenizer learns from: documents from all over, and of those that are books of books not everything."""
    characters = sum(len(text.decode()) for text in documents)
    chosen = [text.decode() for text in documents[:: 1 + characters // _TOKENIZER_CHARACTERS]]
    parts = 1 + sum(map(len, chosen)) // (2 * _TOKENIZER_CHARACTERS)
    return chosen if parts == 1 else [piece for text in chosen for piece in pieces(text)][::parts]
