"""Token cache on disk: written as a stream, renamed once complete, and looked up by its inputs.

An existing cache is complete: a killed run or a full disk leaves a folder of another name, which the next run removes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.checkpoint.manifest import MANIFEST_FILE, check_manifest, manifest_of
from model.files import CheckpointError, sha256, sync_directory, write_file
from model.tokenizer.tokenizer import Tokenizer
from model.train.common.console import Ticker, tell

Tokens = NDArray[np.unsignedinteger]
_KEPT = 2
"""How many corpora of one --out: this one, and the one before, whose run may go on."""
_UNFINISHED = ".tokens-"
_PIECE = 1 << 18
_AT_ONCE = 1 << 21
"""Characters: 2 M of them take 200 MB while they are being read, a gigabyte would take 100 GB."""
_NEAR = 4096
_BREAK = re.compile(r"(?<=\S) ")


@dataclass(frozen=True, slots=True)
class TokenCache:
    """One corpus below `home`. Files of the tokenizer, train.bin and held_out.bin."""

    home: Path
    key: str
    """A digest of everything that made the tokens."""

    @property
    def folder(self) -> Path:
        """Where it stands, once it does."""
        return self.home / self.key[:16]

    def is_whole(self) -> bool:
        """Whether it stands there as it was written."""
        try:
            return check_manifest(self.folder)
        except CheckpointError:
            tell(f"warning: the tokens in {self.folder} are not as they were written; they are made anew")
            return False

    def read(self, name: str, tokenizer: Tokenizer) -> Tokens:
        """Tokens as they lie on the disk, not in memory."""
        return np.memmap(self.folder / f"{name}.bin", dtype=token_dtype(tokenizer), mode="r")

    def write(self, tokenizer: Tokenizer, parts: dict[str, list[bytes]]) -> None:
        """Tokenises each part; all of them are there in the end, or nothing. Raises CheckpointError."""
        with self._unfinished() as folder:
            for name, content in tokenizer.files().items():
                write_file(folder / name, content.encode())
            for name, documents in parts.items():
                _write_tokens(folder / f"{name}.bin", tokenizer, documents)
            hashes = {path.name: sha256(path) for path in folder.iterdir()}
            write_file(folder / MANIFEST_FILE, manifest_of(hashes))
            shutil.rmtree(self.folder, ignore_errors=True)
            folder.rename(self.folder)
            sync_directory(self.home)

    def keep(self) -> None:
        """Removes the corpora of other inputs, but the one kept last before this."""
        os.utime(self.folder)
        others = [path.parent for path in self.home.glob("*/train.bin") if path.parent != self.folder]
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[: 1 - _KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def _unfinished(self) -> Iterator[Path]:
        for left_by_a_killed_run in self.home.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left_by_a_killed_run, ignore_errors=True)
        folder = self.home / f"{_UNFINISHED}{self.key[:16]}"
        try:
            folder.mkdir(parents=True)
            yield folder
        except OSError as error:
            raise CheckpointError(f"{self.home}: the tokens cannot be written ({error.strerror})") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def encode(tokenizer: Tokenizer, documents: Iterable[bytes]) -> Iterator[Tokens]:
    """Tokens in the order of the documents, each after a separator, in pieces of a size that memory bears."""
    begin, dtype = separator(tokenizer), token_dtype(tokenizer)
    for batch in _batches(documents):
        ids = tokenizer.encode_many([text for text, _ in batch])
        for (_, is_first), part in zip(batch, ids, strict=True):
            yield np.array([*begin, *part] if is_first else part, dtype)


def separator(tokenizer: Tokenizer) -> list[int]:
    """What stands before every document: the token that ends a text, then the one that starts it if that is another."""
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    starts = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
    return ends if starts == ends else ends + starts


def token_dtype(tokenizer: Tokenizer) -> type[np.uint16] | type[np.uint32]:
    """The smaller one that holds every id."""
    return np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32


def pieces(text: str, most: int = _PIECE) -> Iterator[str]:
    """A text that is very long in parts, cut before a space after a word: there every split of words cuts too."""
    start = 0
    while len(text) - start > most:
        end = start + most
        breaks = [found.start() for found in _BREAK.finditer(text, max(start + 1, end - _NEAR), end)]
        cut = breaks[-1] if breaks else end
        yield text[start:cut]
        start = cut
    yield text[start:]


def _batches(documents: Iterable[bytes]) -> Iterator[list[tuple[str, bool]]]:
    """(piece, whether a document begins with it), as many as may be encoded together."""
    held: list[tuple[str, bool]] = []
    size = 0
    for document in documents:
        for index, piece in enumerate(pieces(document.decode())):
            held.append((piece, index == 0))
            size += len(piece)
            if size >= _AT_ONCE:
                yield held
                held, size = [], 0
    yield held


def _write_tokens(path: Path, tokenizer: Tokenizer, documents: list[bytes]) -> None:
    ticker, all_bytes, read = Ticker(), sum(map(len, documents)), 0

    def told() -> Iterator[bytes]:
        nonlocal read
        for document in documents:
            read += len(document)
            ticker.tick(f"tokenising: {100 * read / all_bytes:.0f} % of {all_bytes / 1e6:.0f} MB")
            yield document

    with path.open("wb") as file:
        for part in encode(tokenizer, told()):
            file.write(part.tobytes())
        file.flush()
        os.fsync(file.fileno())
