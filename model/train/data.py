"""Documents to token windows: tokenising into a cache, and the order of training. Knows no network."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.files import write_file
from model.tokenizer import SPLIT, Tokenizer
from model.train.hold_out import fraction, split_documents
from model.train.shuffle import Shuffle
from model.train.sources import DataError, read_documents
from model.train.vocabulary import Given, Vocabulary, separator

Tokens = NDArray[np.unsignedinteger]
_TOKENIZER_CHARACTERS = 40_000_000
_STRAIGHT = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2026": "..."})


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokenised text, held-out documents apart. Documents stand behind one another, each after a separator."""

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    n_documents: int
    digest: str
    """SHA-256 over the documents and the options that shaped them."""


def prepare(
    sources: Sequence[str],
    cache: Path,
    *,
    vocabulary: Vocabulary | Given,
    straighten: float,
    held_out_share: float = 0.01,
) -> Corpus:
    """Reads, trains the tokenizer, tokenises; takes tokenizer and tokens from `cache` where the inputs are the same.

    straighten: share of the documents in which curly quotes and long dashes become ASCII, as people type them.
    """
    documents = [_straightened(text, copy, straighten) for copy, text in _numbered_copies(read_documents(sources))]
    digest = hashlib.sha256(f"{vocabulary}/{held_out_share}/{_TOKENIZER_CHARACTERS}/{SPLIT}".encode())
    for text in documents:
        digest.update(hashlib.sha256(text.encode("utf-8")).digest())
    folder = cache / digest.hexdigest()[:16]
    held_out, train = split_documents(documents, held_out_share, alike=_straight)
    if not (folder / "train.bin").exists():
        _tokenise(train, held_out, folder, vocabulary)
    tokenizer = Tokenizer.load(folder)
    return Corpus(
        tokenizer=tokenizer,
        train=np.memmap(folder / "train.bin", dtype=_dtype(tokenizer), mode="r"),
        held_out=np.fromfile(folder / "held_out.bin", dtype=_dtype(tokenizer)),
        n_documents=len(documents),
        digest=digest.hexdigest(),
    )


class Order:
    """Which windows a step sees: a pure function of (seed, step), so that resuming continues as if nothing happened."""

    def __init__(self, tokens: Tokens, *, length: int, windows: int, seed: int) -> None:
        self.tokens, self.length, self.windows, self.seed = tokens, length, windows, seed
        # One window less than fits: each epoch starts at another offset below `length`.
        self.per_epoch = (len(tokens) - 1) // length - 1
        if self.per_epoch < 1:
            raise DataError(f"{len(tokens)} tokens of training text are too few for windows of {length} tokens")
        self._shuffle = Shuffle(self.per_epoch, seed=seed, phases=length)

    def batch(self, step: int) -> NDArray[np.int64]:
        """[windows, length + 1] token ids: inputs are [:, :-1], targets [:, 1:]."""
        starts = [self._start(step * self.windows + i) for i in range(self.windows)]
        return np.stack([self.tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)

    def _start(self, place: int) -> int:
        phase, window = self._shuffle(place)
        return phase + window * self.length


def _numbered_copies(documents: list[str]) -> Iterator[tuple[int, str]]:
    seen: dict[str, int] = {}
    for text in documents:
        seen[text] = seen.get(text, -1) + 1
        yield seen[text], text


def _straightened(text: str, copy: int, share: float) -> str:
    # The second copy of a document lands on the other side of the threshold, where the share allows it.
    return _straight(text) if (fraction(text) + copy / 2) % 1.0 < share else text


def _straight(text: str) -> str:
    """Curly quotes, long dashes and ellipses as people type them."""
    return text.translate(_STRAIGHT)


def _tokenise(train: list[str], held_out: list[str], folder: Path, vocabulary: Vocabulary | Given) -> None:
    characters = sum(map(len, train))
    step = 1 + characters // _TOKENIZER_CHARACTERS
    tokenizer = vocabulary.train(train[::step])
    for name, content in tokenizer.files().items():
        write_file(folder / name, content.encode())
    front = separator(tokenizer)
    for name, texts in (("held_out", held_out), ("train", train)):  # train.bin last: it says that all is there
        ids = [np.array([*front, *part], _dtype(tokenizer)) for part in _encoded(tokenizer, texts)]
        write_file(folder / f"{name}.bin", np.concatenate(ids).tobytes())


def _encoded(tokenizer: Tokenizer, texts: list[str], chunk: int = 256) -> Iterator[list[int]]:
    for start in range(0, len(texts), chunk):
        yield from tokenizer.encode_many(texts[start : start + chunk])


def _dtype(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
