"""Which texts training never sees: decided by the text alone, so that copies and other runs decide alike. No files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

from model.train.sources import DataError

_FEWEST_ROWS = 20


def fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:6], "big") / 2**48


def split_documents(documents: list[str], share: float, *, alike: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """(held out, training). Few documents give up the end of the last one.

    Copies of one document stay on one side, and so do documents of which `alike` makes the same.
    """

    def key(text: str) -> float:
        return fraction("held out" + alike(text))

    held_out = list({key(text): text for text in documents if key(text) < share}.values())
    train = [text for text in documents if key(text) >= share]
    if len(documents) >= 100 and held_out and train:
        return held_out, train
    last = documents[-1]
    cut = len(last) - max(1, len(last) // 20)
    if cut < 1:
        raise DataError("the text is too short to hold anything out")
    # Other copies of it end sooner, since straightened quotes have moved their characters.
    others = [text[: len(text) - len(text) // 10] if key(text) == key(last) else text for text in documents[:-1]]
    return [last[cut:]], [*others, last[:cut]]


def held_out_rows(rows: Iterable[str]) -> set[str]:
    """One in a hundred of the distinct rows, at least one; none where fewer than 20 would have to spare one."""
    distinct = sorted(set(rows), key=fraction)
    return set(distinct[: max(1, len(distinct) // 100)]) if len(distinct) >= _FEWEST_ROWS else set()
