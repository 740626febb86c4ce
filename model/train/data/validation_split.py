"""Which texts training never sees: decided by the text alone, so that copies and other runs decide alike. No files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from model.train.data.text_file import DataError

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
