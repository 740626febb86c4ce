"""Reads training text: files, folders, patterns, standard input, compressed or not; as documents or lines.

A document is what two blank lines, a file's end or a line of .jsonl ends.
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

# Only the current line is in memory: a file may be larger than the memory.

STANDARD_INPUT = Path("-")
_STARTS = {
    b"\xff\xfe": "UTF-16, not UTF-8: convert it (iconv -f utf-16 -t utf-8)",
    b"\xfe\xff": "UTF-16, not UTF-8: convert it (iconv -f utf-16 -t utf-8)",
    b"\x1f\x8b": "compressed by gzip, but not called .gz: rename it",
    b"BZh": "compressed by bzip2: unpack it, or pack it as .gz",
    b"\xfd7zXZ": "compressed by xz: unpack it, or pack it as .gz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it, or pack it as .gz",
    b"PK\x03\x04": "a zip archive (or an office document): take the text out of it",
    b"%PDF": "a PDF: take the text out of it (pdftotext)",
}


class DataError(ValueError):
    """Training data that cannot be used; the message says what to change."""


def lines_of(path: Path) -> Iterator[str]:
    """The lines, each with its "\\n" but perhaps the last; "\\r\\n" becomes "\\n". "-" is standard input.

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
    """What the name ends with, without .gz."""
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _opened(path: Path) -> AbstractContextManager[BinaryIO | gzip.GzipFile]:
    if path != STANDARD_INPUT:
        return gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    if sys.stdin is None:
        raise DataError("-: there is no standard input to read")
    return nullcontext(sys.stdin.buffer)


def _decoded(path: Path, number: int, line: bytes) -> str:
    if number == 1:
        for start, what in _STARTS.items():
            if line.startswith(start):
                raise DataError(f"{path}: this is {what}, or leave it out")
        line = line.removeprefix(codecs.BOM_UTF8)
    if b"\0" in line:
        raise DataError(f"{path}, line {number}: there is a NUL byte, which no text has; leave the file out")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x}"
        raise DataError(
            f"{path}, line {number}: not UTF-8 text ({byte}); convert it (iconv -f ENCODING -t utf-8) or leave it out"
        ) from None
    return f"{text[:-2]}\n" if text.endswith("\r\n") else text


SUFFIXES = (".txt", ".md", ".jsonl")
USUAL_KEY = "text"
_BLANK_LINES = 2
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_KEYS_TOLD = 5


@dataclass(frozen=True, slots=True)
class Sources:
    """What the user named, not yet looked at. A source given twice counts twice."""

    names: Sequence[str]
    """Files, folders, glob patterns, or "-" for standard input; .gz is unpacked."""
    text_key: str = USUAL_KEY
    """Under which a line of .jsonl has its text."""
    without: Path | None = None
    """A folder that is passed over: what a run writes must not become what it reads."""

    def paths(self) -> list[Path]:
        """The files, those of each folder in the order of their names. Raises DataError."""
        return [path for name in self.names for path in _expand(name, self.without)]

    def documents(self) -> Iterator[tuple[Path, bytes]]:
        """Each with its file, as UTF-8 and one at a time; at least one. Raises DataError."""
        found = False
        for path in self.paths():
            is_json = suffix(path) == ".jsonl"
            for text in _json_texts(path, self.text_key) if is_json else _parted(lines_of(path)):
                found = True
                yield path, text
        if not found:
            raise DataError(f"no text in {', '.join(self.names)}")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file."""

    where: str
    """File and line number, for messages."""
    text: str


def read_lines(sources: Sources) -> list[Line]:
    """Lines that are not blank; of a .jsonl the texts. Raises DataError."""
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


def _expand(source: str, without: Path | None) -> list[Path]:
    path = Path(source)
    if path == STANDARD_INPUT:
        return [path]
    if path.is_dir():
        found = sorted(_walk(path, without))
        if not found:
            raise DataError(f"{source}: no {', '.join(SUFFIXES)} file (or .gz of one) in this folder")
        return found
    if path.exists():  # also a pipe: --data <(zcat a.gz)
        if suffix(path) == ".json":
            raise DataError(f"{source}: JSON is no text: write an object on each line of a .jsonl, or call it .txt")
        return [path]
    matches = sorted(glob.glob(source, recursive=True))  # noqa: PTH207 (patterns may be absolute)
    if not matches:
        raise DataError(f"{source}: no such file or folder")
    return [file for match in matches for file in _expand(match, without)]


def _walk(folder: Path, without: Path | None) -> Iterator[Path]:
    """Text files below `folder`. Hidden ones (.git, ._notes.txt) are not meant; links to folders may go in circles."""
    skipped = without.resolve() if without else None
    for place, folders, names in os.walk(folder, onerror=_refuse):
        here = Path(place)
        folders[:] = [name for name in folders if not name.startswith(".") and (here / name).resolve() != skipped]
        yield from (here / name for name in names if not name.startswith(".") and suffix(Path(name)) in SUFFIXES)


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})")


def _parted(lines: Iterable[str]) -> Iterator[bytes]:
    held = bytearray()  # a document may be all there is: as a list of lines it would take seven times its size
    blank = 0
    for line in lines:
        held += line.encode()
        blank = blank + 1 if line == "\n" else 0
        if blank == _BLANK_LINES:
            yield from _stripped(held)
            held.clear()
    yield from _stripped(held)


def _stripped(held: bytearray) -> Iterator[bytes]:
    if text := bytes(held.strip(b"\n")):
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
            f'{path}, line {number}: nothing under "{key}"; texts stand under {", ".join(others[:_KEYS_TOLD])} '
            "(--text-key)"
        )
    raise DataError(f'{path}, line {number}: must be a JSON object with a string of whole characters under "{key}"')
