"""Turns documents into token windows: the validation split, the tokenizer, the token cache."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from model.tokenizer.tokenizer import SPLIT, Tokenizer
from model.train.common.console import Ticker
from model.train.data.sources import DataError, Sources
from model.train.data.token_cache import TokenCache, Tokens, encode, pieces
from model.train.data.vocabulary import Vocabulary

_FEWEST_ROWS = 20
_FEWEST_DOCUMENTS = 100
_END = 0.05
"""Of all text, where a share of fewer documents would be none or the one short last one."""
_CURLY = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2026": "..."}
_STRAIGHT = [(curly.encode(), straight.encode()) for curly, straight in _CURLY.items()]


@dataclass(frozen=True, slots=True)
class Document:
    """A text as UTF-8: one curly quote makes a str of it take twice the memory."""

    text: bytes
    key: bytes
    """The same for copies, be their quotes curly or straight."""


def fraction(digest: bytes) -> float:
    """A number in [0, 1) from a SHA-256."""
    return int.from_bytes(digest[:6], "big") / 2**48


def straight(text: bytes) -> bytes:
    """Curly quotes, long dashes and ellipses as people type them."""
    for curly, typed in _STRAIGHT:
        text = text.replace(curly, typed)
    return text


def document_key(text: bytes) -> bytes:
    """What decides about a document and all its copies."""
    return hashlib.sha256(b"held out" + straight(text)).digest()


def least_share(n_documents: int, share: float) -> float:
    """How much of the text is held out at least, where a share of the documents was asked for."""
    return share if n_documents >= _FEWEST_DOCUMENTS else max(share, _END)


def split_documents(documents: list[Document], share: float) -> tuple[list[bytes], list[bytes]]:
    """(held out, training). Few documents give up the end of all their text. Raises DataError.

    Copies of one document stay on one side.
    """
    held_out = list({d.key: d.text for d in documents if fraction(d.key) < share}.values())
    train = [d.text for d in documents if fraction(d.key) >= share]
    if len(documents) >= _FEWEST_DOCUMENTS and held_out and train:
        return held_out, train
    return _split_end(documents, least_share(0, share))


def _split_end(documents: list[Document], share: float) -> tuple[list[bytes], list[bytes]]:
    """The last documents, the first of which gives up only its own end. Of a document that is cut no copy is learnt."""
    distinct = list({d.key: d.text for d in documents}.items())
    wanted = max(1, int(share * sum(len(text) for _, text in distinct)))
    held_out: dict[bytes, bytes] = {}
    while len(distinct) > 1 and len(distinct[-1][1]) <= wanted:
        key, held_out[key] = distinct.pop()
        wanted -= len(held_out[key])
    train = [d.text for d in documents if d.key not in held_out]
    if wanted or not held_out:
        key, text = distinct[-1]
        train = [d.text for d in documents if d.key not in held_out and d.key != key]
        train, held_out[key] = [*train, _whole(text[:-wanted])], _whole(text[-wanted:])
    if not all(train) or not all(held_out.values()):
        raise DataError("the text is too short to hold anything out")
    return list(held_out.values())[::-1], train


def _whole(part: bytes) -> bytes:
    """Without half a character at either end."""
    return part.decode(errors="ignore").encode()


def held_out_rows(rows: Iterable[str], share: float = 0.01) -> set[str]:
    """Such a share of the distinct rows, at least one; none where fewer than 20 would have to spare one."""
    distinct = sorted(set(rows), key=lambda row: fraction(hashlib.sha256(row.encode()).digest()))
    spared = max(1, int(len(distinct) * share + 1e-9))
    return set(distinct[:spared]) if len(distinct) >= _FEWEST_ROWS else set()


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
