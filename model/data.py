"""Texts on disk to token windows: reading, holding out, tokenising into a cache, and the order of training.

Knows no network. A document is what two blank lines, a file's end or a line of .jsonl ends.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.files import write_file
from model.tokenizer import SPLIT, Tokenizer, TokenizerError

Tokens = NDArray[np.unsignedinteger]
_SUFFIXES = (".txt", ".md", ".jsonl")
_TOKENIZER_CHARACTERS = 40_000_000
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_STRAIGHT = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "\u2026": "..."})


class DataError(ValueError):
    """Training data that cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Tokenised text, held-out documents apart. Documents stand behind one another, each after a separator."""

    tokenizer: Tokenizer
    train: Tokens
    held_out: Tokens
    n_documents: int
    digest: str
    """SHA-256 over the documents and the options that shaped them."""


def read_documents(sources: Sequence[str]) -> list[str]:
    """Documents of files, folders, glob patterns or "-" (standard input). Raises DataError.

    A source given twice counts twice. Reads .txt, .md and .jsonl (key "text"), each also as .gz.
    """
    documents: list[str] = []
    for source in sources:
        paths = _expand(source)
        for path in paths:
            documents += _split(path, _read(path))
    if not documents:
        raise DataError(f"no text in {', '.join(sources)}")
    return documents


def prepare(
    sources: Sequence[str], cache: Path, *, vocab_size: int, straighten: float, held_out_share: float = 0.01
) -> Corpus:
    """Reads, trains the tokenizer, tokenises; takes tokenizer and tokens from `cache` where the inputs are the same.

    straighten: share of the documents in which curly quotes and long dashes become ASCII, as people type them.
    """
    documents = [_straightened(text, copy, straighten) for copy, text in _numbered_copies(read_documents(sources))]
    digest = hashlib.sha256(f"{vocab_size}/{held_out_share}/{_TOKENIZER_CHARACTERS}/{SPLIT}".encode())
    for text in documents:
        digest.update(hashlib.sha256(text.encode("utf-8")).digest())
    folder = cache / digest.hexdigest()[:16]
    held_out, train = _hold_out(documents, held_out_share)
    if not (folder / "train.bin").exists():
        _tokenise(train, held_out, folder, vocab_size)
    return Corpus(
        tokenizer=Tokenizer.load(folder),
        train=np.memmap(folder / "train.bin", dtype=_dtype(vocab_size), mode="r"),
        held_out=np.fromfile(folder / "held_out.bin", dtype=_dtype(vocab_size)),
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
        self._epoch, self._permutation, self._phase = -1, np.empty(0, dtype=np.int64), 0

    def batch(self, step: int) -> NDArray[np.int64]:
        """[windows, length + 1] token ids: inputs are [:, :-1], targets [:, 1:]."""
        starts = [self._start(step * self.windows + i) for i in range(self.windows)]
        return np.stack([self.tokens[start : start + self.length + 1] for start in starts]).astype(np.int64)

    def _start(self, index: int) -> int:
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epoch, self._phase = epoch, int(generator.integers(self.length))
            self._permutation = generator.permutation(self.per_epoch)
        return self._phase + int(self._permutation[place]) * self.length


def _expand(source: str) -> list[Path]:
    path = Path(source)
    if source == "-" or path.is_file():
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and _suffix(p) in _SUFFIXES]
        if not found:
            raise DataError(f"{source}: no {', '.join(_SUFFIXES)} file in this folder")
        return sorted(found)
    matches = sorted(glob.glob(source, recursive=True))  # noqa: PTH207 (patterns may be absolute)
    if not matches:
        raise DataError(f"{source}: no such file or folder")
    return [file for match in matches for file in _expand(match)]


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _read(path: Path) -> str:
    try:
        if str(path) == "-" and sys.stdin is None:
            raise DataError("-: there is no standard input to read")
        content = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise DataError(f"{path}: not UTF-8 text; convert it or leave it out") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None


def _split(path: Path, text: str) -> list[str]:
    if _suffix(path) == ".jsonl":
        return [document for line in text.split("\n") if line.strip() and (document := _json_text(path, line))]
    return [document for part in re.split(r"\n{3,}", text) if (document := part.strip("\n"))]


def _json_text(path: Path, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        text = None
    if not isinstance(text, str) or _LONE_SURROGATE.search(text):
        raise DataError(f'{path}: every line must be a JSON object with a string of whole characters under "text"')
    return text


def _numbered_copies(documents: list[str]) -> Iterator[tuple[int, str]]:
    seen: dict[str, int] = {}
    for text in documents:
        seen[text] = seen.get(text, -1) + 1
        yield seen[text], text


def _fraction(text: str) -> float:
    """A number in [0, 1) that depends on the text alone, so that copies and other runs decide alike."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:6], "big") / 2**48


def _straightened(text: str, copy: int, share: float) -> str:
    # The second copy of a document lands on the other side of the threshold, where the share allows it.
    return text.translate(_STRAIGHT) if (_fraction(text) + copy / 2) % 1.0 < share else text


def _hold_out(documents: list[str], share: float) -> tuple[list[str], list[str]]:
    """(held out, training). Copies of one document stay on one side; few documents give up the end of the last one."""

    def key(text: str) -> float:
        return _fraction("held out" + text.translate(_STRAIGHT))

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


def _tokenise(train: list[str], held_out: list[str], folder: Path, vocab_size: int) -> None:
    characters = sum(map(len, train))
    step = 1 + characters // _TOKENIZER_CHARACTERS
    tokenizer = Tokenizer.train(train[::step], vocab_size)
    if tokenizer.eos_id is None:
        raise TokenizerError("the tokenizer has no separator")
    for name, content in tokenizer.files().items():
        write_file(folder / name, content.encode())
    for name, texts in (("held_out", held_out), ("train", train)):  # train.bin last: it says that all is there
        ids = (_with_separator(tokenizer.eos_id, part) for part in _encoded(tokenizer, texts))
        write_file(folder / f"{name}.bin", np.concatenate([np.array(i, _dtype(vocab_size)) for i in ids]).tobytes())


def _encoded(tokenizer: Tokenizer, texts: list[str], chunk: int = 256) -> Iterator[list[int]]:
    for start in range(0, len(texts), chunk):
        yield from tokenizer.encode_many(texts[start : start + chunk])


def _with_separator(separator: int, ids: list[int]) -> list[int]:
    return [separator, *ids]


def _dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if vocab_size <= 2**16 else np.uint32
