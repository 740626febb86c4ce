"""Token cache on disk: written as a stream, renamed once complete, and looked up by its inputs.

An existing cache is complete: a killed run or a full disk leaves a temporary folder, which the next run removes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.checkpoint.manifest import MANIFEST_FILE, check_manifest, manifest_of
from model.files import CheckpointError, move, replaced_file, sha256, write_file
from model.tokenizer.tokenizer import Tokenizer
from model.train.reporting.console import Ticker, print_stderr

Tokens = NDArray[np.unsignedinteger]
_UNFINISHED = ".tokens-"
_PIECE = 1 << 18
_MAX_BATCH_CHARACTERS = 1 << 21
"""2 M characters take 200 MB while being encoded; a gigabyte would take 100 GB."""
_SPLIT_WINDOW = 4096
_BREAK = re.compile(r"(?<=\S) ")


@dataclass(frozen=True, slots=True)
class TokenCache:
    """One corpus in `directory`: the tokenizer's files, train.bin and held_out.bin."""

    directory: Path
    key: str
    """Digest of all inputs of the tokens."""

    @property
    def folder(self) -> Path:
        """Folder of the cached corpus, which may not exist yet."""
        return self.directory / self.key[:16]

    def is_valid(self) -> bool:
        """Whether the corpus is cached and unchanged."""
        try:
            return check_manifest(self.folder)
        except CheckpointError:
            print_stderr(f"warning: the cached tokens in {self.folder} are damaged; tokenizing again")
            return False

    def read(self, name: str, tokenizer: Tokenizer) -> Tokens:
        """Memory-mapped tokens."""
        return np.memmap(self.folder / f"{name}.bin", dtype=_dtype(tokenizer), mode="r")

    def write(self, tokenizer: Tokenizer, parts: dict[str, list[bytes]]) -> None:
        """Tokenizes and writes all parts atomically. Raises CheckpointError."""
        for leftover in self.directory.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folder = self.directory / f"{_UNFINISHED}{self.key[:16]}"
        try:
            folder.mkdir(parents=True)
            for name, content in tokenizer.files().items():
                write_file(folder / name, content.encode())
            for name, documents in parts.items():
                _write_tokens(folder / f"{name}.bin", tokenizer, documents)
            hashes = {path.name: sha256(path) for path in folder.iterdir()}
            write_file(folder / MANIFEST_FILE, manifest_of(hashes))
            shutil.rmtree(self.folder, ignore_errors=True)
            move(folder, self.folder)
        except OSError as error:
            raise CheckpointError(f"{self.directory}: the tokens cannot be written ({error.strerror})") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def evict_old(self) -> None:
        """Removes the corpora of other inputs, except the most recent one, whose run may resume."""
        os.utime(self.folder)
        others = [path.parent for path in self.directory.glob("*/train.bin") if path.parent != self.folder]
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[:-1]:
            shutil.rmtree(old, ignore_errors=True)


def encode(tokenizer: Tokenizer, documents: Iterable[bytes]) -> Iterator[Tokens]:
    """Yields the tokens of the documents in order, each after a separator, in pieces of bounded size."""
    prefix, dtype = separator(tokenizer), _dtype(tokenizer)
    for batch in _batches(documents):
        ids = tokenizer.encode_many([text for text, _ in batch])
        for (_, starts_document), part in zip(batch, ids, strict=True):
            yield np.array([*prefix, *part] if starts_document else part, dtype)


def separator(tokenizer: Tokenizer) -> list[int]:
    """Tokens before every document: the end token of a text, then its start token if that is different."""
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    starts = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    return ends if starts == ends else ends + starts


def _dtype(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    """The smallest dtype that holds every id."""
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def split_text(text: str, max_length: int = _PIECE) -> Iterator[str]:
    """Splits a long text before spaces that follow a word, where every pre-tokenizer splits too."""
    start = 0
    while len(text) - start > max_length:
        end = start + max_length
        breaks = [found.start() for found in _BREAK.finditer(text, max(start + 1, end - _SPLIT_WINDOW), end)]
        cut = breaks[-1] if breaks else end
        yield text[start:cut]
        start = cut
    yield text[start:]


def _batches(documents: Iterable[bytes]) -> Iterator[list[tuple[str, bool]]]:
    """Yields lists of (piece, whether it starts a document) to encode together."""
    buffer: list[tuple[str, bool]] = []
    size = 0
    for document in documents:
        for index, piece in enumerate(split_text(document.decode())):
            buffer.append((piece, index == 0))
            size += len(piece)
            if size >= _MAX_BATCH_CHARACTERS:
                yield buffer
                buffer, size = [], 0
    yield buffer


def _write_tokens(path: Path, tokenizer: Tokenizer, documents: list[bytes]) -> None:
    ticker, all_bytes, read = Ticker(), sum(map(len, documents)), 0
    with replaced_file(path) as file:
        for part in encode(tokenizer, documents):
            read += file.write(part.tobytes())
            ticker.tick(f"tokenizing {all_bytes / 1e6:.0f} MB: {read / part.itemsize / 1e6:.1f} M tokens")
