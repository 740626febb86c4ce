"""Reads training text: files, folders, patterns, standard input, compressed or not; as documents or lines.

Two blank lines or the end of a file end a document; each line of a .jsonl is a document.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

# Only the current line is in memory: files may be larger than memory.

STANDARD_INPUT = Path("-")
_SIGNATURES = {
    b"\xff\xfe": "UTF-16, not UTF-8: convert it (iconv -f utf-16 -t utf-8)",
    b"\xfe\xff": "UTF-16, not UTF-8: convert it (iconv -f utf-16 -t utf-8)",
    b"\x1f\x8b": "compressed by gzip, but not named .gz: rename it",
    b"BZh": "compressed by bzip2: decompress it, or use .gz",
    b"\xfd7zXZ": "compressed by xz: decompress it, or use .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: decompress it, or use .gz",
    b"PK\x03\x04": "a zip archive (or an office document): extract the text",
    b"%PDF": "a PDF: extract the text (pdftotext)",
}


class DataError(ValueError):
    """Training data that cannot be used; the message says what to change."""


def lines_of(path: Path) -> Iterator[str]:
    """The lines, each with its "\\n" except possibly the last; "\\r\\n" becomes "\\n". "-" is standard input.

    Raises DataError.
    """
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                yield _decoded(path, number, line)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: cannot be read ({reason})") from None


def suffix(path: Path) -> str:
    """Suffix of the name, ignoring .gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _opened(path: Path) -> AbstractContextManager[BinaryIO | gzip.GzipFile]:
    if path != STANDARD_INPUT:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    if sys.stdin is None:
        raise DataError("-: there is no standard input to read")
    return nullcontext(sys.stdin.buffer)


def _decoded(path: Path, number: int, line: bytes) -> str:
    if number == 1:
        for start, what in _SIGNATURES.items():
            if line.startswith(start):
                raise DataError(f"{path}: this is {what}, or omit it")
        line = line.removeprefix(codecs.BOM_UTF8)
    if b"\0" in line:
        raise DataError(f"{path}, line {number}: contains a NUL byte, so it is not text; omit the file")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x}"
        raise DataError(
            f"{path}, line {number}: not UTF-8 text ({byte}); convert it (iconv -f ENCODING -t utf-8) or omit it"
        ) from None
    return f"{text[:-2]}\n" if text.endswith("\r\n") else text


SUFFIXES = (".txt", ".md", ".jsonl")
DEFAULT_TEXT_KEY = "text"
_BLANK_LINES = 2
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_LISTED_KEYS = 5


@dataclass(frozen=True, slots=True)
class Sources:
    """Text sources named by the user, not yet opened. A source given twice counts twice."""

    names: Sequence[str]
    """Files, folders, glob patterns, or "-" for standard input; .gz is decompressed."""
    text_key: str = DEFAULT_TEXT_KEY
    """Key of the text in each line of a .jsonl."""
    exclude: Path | None = None
    """Folder to skip: a run must not read its own output."""

    def paths(self) -> list[Path]:
        """The files, sorted by name within each folder. Raises DataError."""
        return [path for name in self.names for path in _expand(name, self.exclude)]

    def documents(self) -> Iterator[tuple[Path, bytes]]:
        """Yields (file, document as UTF-8), at least one. Raises DataError."""
        found = False
        for path in self.paths():
            is_json = suffix(path) == ".jsonl"
            for text in _json_texts(path, self.text_key) if is_json else _split_documents(lines_of(path)):
                found = True
                yield path, text
        if not found:
            raise DataError(f"no text in {', '.join(self.names)}")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file."""

    location: str
    """File and line number, for messages."""
    text: str


def read_lines(sources: Sources) -> list[Line]:
    """The non-blank lines; the texts of a .jsonl. Raises DataError."""
    lines: list[Line] = []
    for path in sources.paths():
        for number, line in enumerate(lines_of(path), start=1):
            text = line.removesuffix("\n")
            if suffix(path) == ".jsonl" and text.strip():
                text = _json_text(path, number, text, sources.text_key)
            if text.strip(" "):
                lines.append(Line(f"{path}, line {number}", text))
    if not lines:
        raise DataError(f"no text in {', '.join(sources.names)}")
    return lines


def _expand(source: str, exclude: Path | None) -> list[Path]:
    path = Path(source)
    if path == STANDARD_INPUT:
        return [path]
    if path.is_dir():
        found = sorted(_walk(path, exclude))
        if not found:
            raise DataError(f"{source}: no {', '.join(SUFFIXES)} file (or .gz of one) in this folder")
        return found
    if path.exists():  # also a pipe: --data <(zcat a.gz)
        if suffix(path) == ".json":
            raise DataError(f"{source}: JSON is not text: use a .jsonl with one object per line, or rename it to .txt")
        return [path]
    matches = sorted(glob.glob(source, recursive=True))  # noqa: PTH207 (patterns may be absolute)
    if not matches:
        raise DataError(f"{source}: no such file or folder")
    return [file for match in matches for file in _expand(match, exclude)]


def _walk(folder: Path, exclude: Path | None) -> Iterator[Path]:
    """Text files in `folder`. Skips hidden ones (.git, ._notes.txt), and links to folders, which may form cycles."""
    skipped = exclude.resolve() if exclude else None
    for root, folders, names in os.walk(folder, onerror=_raise_unreadable):
        parent = Path(root)
        folders[:] = [name for name in folders if not name.startswith(".") and (parent / name).resolve() != skipped]
        yield from (parent / name for name in names if not name.startswith(".") and suffix(Path(name)) in SUFFIXES)


def _raise_unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})")


def _split_documents(lines: Iterable[str]) -> Iterator[bytes]:
    buffer = bytearray()  # a document may be the whole corpus: a list of lines would take seven times its size
    blank = 0
    for line in lines:
        buffer += line.encode()
        blank = blank + 1 if line == "\n" else 0
        if blank == _BLANK_LINES:
            yield from _stripped(buffer)
            buffer.clear()
    yield from _stripped(buffer)


def _stripped(buffer: bytearray) -> Iterator[bytes]:
    if text := bytes(buffer.strip(b"\n")):
        yield text


def _json_texts(path: Path, key: str) -> Iterator[bytes]:
    for number, line in enumerate(lines_of(path), start=1):
        if line.strip() and (text := _json_text(path, number, line, key)):
            yield text.encode()


def _json_text(path: Path, number: int, line: str, key: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    text = row.get(key) if isinstance(row, dict) else None
    if isinstance(text, str) and not _LONE_SURROGATE.search(text):
        return text
    others = [name for name, value in row.items() if isinstance(value, str)] if isinstance(row, dict) else []
    if text is None and others:
        raise DataError(
            f'{path}, line {number}: no key "{key}"; keys with text are {", ".join(others[:_MAX_LISTED_KEYS])} '
            "(--text-key)"
        )
    raise DataError(f'{path}, line {number}: must be a JSON object with a valid Unicode string under "{key}"')
