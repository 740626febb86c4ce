"""Which texts training never sees: decided by the text alone, so that copies and other runs decide alike. No files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from model.train.text_file import DataError

_FEWEST_ROWS = 20
_FEWEST_DOCUMENTS = 100
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


def split_documents(documents: list[Document], share: float) -> tuple[list[bytes], list[bytes]]:
    """(held out, training). Few documents give up their ends. Raises DataError.

    Copies of one document stay on one side.
    """
    held_out = list({d.key: d.text for d in documents if fraction(d.key) < share}.values())
    train = [d.text for d in documents if fraction(d.key) >= share]
    if len(documents) >= _FEWEST_DOCUMENTS and held_out and train:
        return held_out, train
    return _ends(documents, share)


def _ends(documents: list[Document], share: float) -> tuple[list[bytes], list[bytes]]:
    """The same, of each document its end: the last one alone may be two words, which measure nothing."""
    ends: dict[bytes, bytes] = {}
    train = []
    for document in documents:
        text = document.text.decode()
        cut = len(text) - max(1, len(text) // 20, int(len(text) * share))
        if document.key in ends:
            # Copies end sooner, since straightened quotes have moved their characters.
            train.append(_begin(document.text, share))
        elif cut < 1:
            train.append(document.text)
        else:
            ends[document.key] = text[cut:].encode()
            train.append(text[:cut].encode())
    if not ends:
        raise DataError("the text is too short to hold anything out")
    return list(ends.values()), train


def held_out_rows(rows: Iterable[str], share: float = 0.01) -> set[str]:
    """Such a share of the distinct rows, at least one; none where fewer than 20 would have to spare one."""
    distinct = sorted(set(rows), key=lambda row: fraction(hashlib.sha256(row.encode()).digest()))
    spared = max(1, int(len(distinct) * share + 1e-9))
    return set(distinct[:spared]) if len(distinct) >= _FEWEST_ROWS else set()


def _begin(text: bytes, share: float) -> bytes:
    characters = text.decode()
    return characters[: len(characters) - max(len(characters) // 10, int(len(characters) * 2 * share))].encode()
