"""Turns documents into tokens: the validation split, the tokenizer, the token cache."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model.tokenizer.tokenizer import SPLIT, Tokenizer
from model.train.data.sources import DataError, Sources
from model.train.data.token_cache import TokenCache, Tokens, encode, split_text
from model.train.data.vocabulary import Vocabulary
from model.train.reporting.console import Ticker

_MIN_ROWS = 20
_MIN_DOCUMENTS = 100
_MIN_FRACTION = 0.05
"""Held-out fraction of the text if there are fewer documents, whose share could be empty or one short document."""
_OPENING = 36
"""Most characters of an opening; a paragraph of prose has twice as many."""
_CURLY = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2026": "..."}
_STRAIGHT = [(curly.encode(), straight.encode()) for curly, straight in _CURLY.items()]
_TOKENIZER_CHARACTERS = 40_000_000
_SHORTEST_LEAK = 200
"""In bytes. Shorter duplicates are allowed: "THE END" may be in two books."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text as UTF-8: as str, a single curly quote would double its memory."""

    text: bytes
    key: bytes
    """Decides the split; equal for copies, with curly or straight quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokenized text, training and held-out. Documents are concatenated, each after a separator."""

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    n_documents: int
    digest: str
    """SHA-256 over the documents and the options that shaped them."""
    openings: Sequence[str]
    """First words of some held-out documents."""
    unseen: Mapping[str, Tokens]
    """File name -> text that is excluded from training."""


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
    """Reads the documents, trains the tokenizer and tokenizes; uses `cache` if the inputs are unchanged.

    straighten: share of the documents in which curly quotes and long dashes become ASCII. tokenizer: an existing one,
    to use instead. Raises DataError, TokenizerError and CheckpointError.
    """
    documents = _read(sources, straighten)
    unseen_texts = _read_unseen(unseen, straighten, {document.key for document in documents}) if unseen else {}
    n_documents, cached = len(documents), TokenCache(cache, _digest(documents, vocabulary, held_out_share, tokenizer))
    held_out, train = split_documents(documents, held_out_share)
    del documents  # frees memory: the training part of a split document is a copy
    if not cached.is_valid():
        new_tokenizer = tokenizer or vocabulary.train(_sample(train))
        cached.write(new_tokenizer, {"held_out": held_out, "train": train})
    cached.evict_old()
    used = tokenizer or Tokenizer.load(cached.folder)
    return Corpus(
        tokenizer=used,
        train=cached.read("train", used),
        held_out=cached.read("held_out", used),
        n_documents=n_documents,
        digest=cached.key,
        openings=openings(held_out),
        unseen={name: np.concatenate(list(encode(used, texts))) for name, texts in unseen_texts.items()},
    )


def document_of(text: bytes, *, straightened: bool = False) -> Document:
    """The document with this text, in which `straightened` replaces curly quotes, long dashes and ellipses by ASCII."""
    plain = text
    for curly, replacement in _STRAIGHT:
        plain = plain.replace(curly, replacement)
    return Document(plain if straightened else text, hashlib.sha256(b"held out" + plain).digest())


def split_documents(documents: list[Document], share: float) -> tuple[list[bytes], list[bytes]]:
    """(held out, training). With few documents, holds out the end of the whole text. Raises DataError.

    All copies of a document are on the same side.
    """
    held_out = list({d.key: d.text for d in documents if _fraction(d.key) < share}.values())
    train = [d.text for d in documents if _fraction(d.key) >= share]
    if len(documents) >= _MIN_DOCUMENTS and held_out and train:
        return held_out, train
    return _split_end(documents, max(share, _MIN_FRACTION))


def _split_end(documents: list[Document], share: float) -> tuple[list[bytes], list[bytes]]:
    """Holds out the last documents, and the end of the one before. Training excludes copies of the split document."""
    distinct = list({d.key: d.text for d in documents}.items())
    wanted = max(1, int(share * sum(len(text) for _, text in distinct)))
    held_out: dict[bytes, bytes] = {}
    while len(distinct) > 1 and len(distinct[-1][1]) <= wanted:
        key, held_out[key] = distinct.pop()
        wanted -= len(held_out[key])
    rest = []
    if wanted or not held_out:
        key, text = distinct[-1]
        held_out[key], rest = _whole_characters(text[-wanted:]), [_whole_characters(text[:-wanted])]
    train = [d.text for d in documents if d.key not in held_out] + rest
    if not all(train) or not all(held_out.values()):
        raise DataError("the text is too short to hold out a part; add more text")
    return list(held_out.values())[::-1], train


def _whole_characters(part: bytes) -> bytes:
    """Drops partial UTF-8 characters at both ends."""
    return part.decode(errors="ignore").encode()


def openings(documents: Sequence[bytes], count: int = 4) -> list[str]:
    """First words of paragraphs of evenly spaced documents; of several paragraphs each where documents are few.

    Skips headings, and what begins in the middle of a sentence, as the end of a split document does.
    """
    n_chosen = min(count, len(documents))
    n_each = -(-count // n_chosen)
    found: list[str] = []
    for i in range(n_chosen):
        document = documents[i * len(documents) // n_chosen].decode()
        paragraphs = [" ".join(text.split()) for text in document.split("\n\n" if "\n\n" in document else "\n")]
        prose = [text for text in paragraphs if len(text) > 2 * _OPENING and not text[0].islower()]
        prose = list(dict.fromkeys(prose or [text for text in paragraphs if text]))
        found += [_first_words(prose[j * len(prose) // n_each]) for j in range(min(n_each, len(prose)))]
    return list(dict.fromkeys(found))[:count]


def _first_words(text: str) -> str:
    cut = text[: _OPENING + 1]
    return cut.rpartition(" ")[0] or cut[:_OPENING] if len(text) > _OPENING else text


def held_out_rows(rows: Iterable[str], share: float = 0.01) -> set[str]:
    """A share of the distinct rows, at least one; empty if there are fewer than 20."""
    distinct = sorted(set(rows), key=lambda row: _fraction(hashlib.sha256(row.encode()).digest()))
    n_held_out = max(1, int(len(distinct) * share + 1e-9))
    return set(distinct[:n_held_out]) if len(distinct) >= _MIN_ROWS else set()


def _fraction(digest: bytes) -> float:
    """A number in [0, 1) from a SHA-256."""
    return int.from_bytes(digest[:6], "big") / 2**48


def _read(sources: Sources, share: float) -> list[Document]:
    """All documents, a share of them with straight quotes. Copies alternate if the share allows it."""
    documents: list[Document] = []
    copies: Counter[bytes] = Counter()
    ticker, size = Ticker(), 0
    for path, text in sources.documents():
        digest = hashlib.sha256(text).digest()
        is_straightened = (_fraction(digest) + copies[digest] / 2) % 1.0 < share
        copies[digest] += 1
        documents.append(document_of(text, straightened=is_straightened))
        size += len(text)
        ticker.tick(f"reading: {size / 1e6:.0f} MB, {len(documents)} documents, now {path}")
    return documents


def _read_unseen(unseen: Sources, share: float, training_keys: set[bytes]) -> dict[str, list[bytes]]:
    """Documents by file. Raises DataError if one of them is also in the training data."""
    found: dict[str, list[bytes]] = {}
    for path in unseen.paths():
        documents = _read(replace(unseen, names=[str(path)]), share)
        leaked = [document for document in documents if document.key in training_keys]
        if len(leaked) == len(documents) or any(len(document.text) >= _SHORTEST_LEAK for document in leaked):
            raise DataError(
                f"--unseen {path}: {len(leaked)} of its {len(documents)} documents are also in --data; "
                "remove them from one of the two"
            )
        found[str(path)] = [document.text for document in documents]
    return found


def _digest(documents: list[Document], vocabulary: Vocabulary, share: float, tokenizer: Tokenizer | None) -> str:
    # `fewer` decides between a tokenizer and an error, not between two tokenizers.
    made_by = replace(vocabulary, fewer=False) if tokenizer is None else sorted(tokenizer.files().items())
    digest = hashlib.sha256(f"{made_by}/{share}/{_TOKENIZER_CHARACTERS}/{SPLIT}".encode())
    for document in documents:
        digest.update(hashlib.sha256(document.text).digest())
    return digest.hexdigest()


def _sample(documents: list[bytes]) -> list[str]:
    """Text to train a tokenizer on: documents from the whole corpus, and only parts of very long ones."""
    characters = sum(len(text.decode()) for text in documents)
    chosen = [text.decode() for text in documents[:: 1 + characters // _TOKENIZER_CHARACTERS]]
    parts = 1 + sum(map(len, chosen)) // (2 * _TOKENIZER_CHARACTERS)
    return chosen if parts == 1 else [piece for text in chosen for piece in split_text(text)][::parts]
