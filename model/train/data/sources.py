"""Reads training text: files, folders, patterns, standard input, compressed or not; as documents or lines.

Two blank lines or the end of a file end a document; each line of a .jsonl or .ndjson is a document. Only the
current line or document is in memory: files may be larger than memory.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from model.train.data.file_kinds import (
    SUFFIXES,
    content_problem,
    encoding_advice,
    has_json_lines,
    how_to_convert,
    suffix,
)

STANDARD_INPUT = Path("-")
DEFAULT_TEXT_KEY = "text"
_MAX_NAME_LENGTH = 200
"""Characters of a missing file's name in an error message."""
_MAX_KINDS, _MAX_SUFFIX_LENGTH = 8, 12
"""Of the line about what is left out."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class DataError(ValueError):
    """Training data that cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, or the text in one line of a .jsonl."""

    path: Path
    number: int
    text: str

    @property
    def location(self) -> str:
        """File and line number, for messages."""
        return f"{self.path}, line {self.number}"


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

    def left_out(self) -> list[str]:
        """One line for each folder with files that are not read: how many of each suffix."""
        folders = [name for name in self.names if os.path.isdir(name)]  # noqa: PTH112
        return [line for name in folders if (line := _describe_left_out(name, self.exclude))]

    def documents(self) -> Iterator[tuple[Path, bytes]]:
        """Yields (file, document as UTF-8), at least one. Raises DataError."""
        found = False
        for path in self.paths():
            lines = self._lines(path)
            for text in (line.text.encode() for line in lines) if has_json_lines(path) else _documents(lines):
                if text:
                    found = True
                    yield path, text
        if not found:
            raise DataError(f"no text in {', '.join(self.names)}")

    def lines(self) -> list[Line]:
        """The non-blank lines, without their ends. Raises DataError."""
        all_lines = (line for path in self.paths() for line in self._lines(path))
        found = [Line(line.path, line.number, line.text.removesuffix("\n")) for line in all_lines]
        if not (kept := [line for line in found if line.text.strip(" ")]):
            raise DataError(f"no text in {', '.join(self.names)}")
        return kept

    def _lines(self, path: Path) -> Iterator[Line]:
        """The lines, each with its end except possibly the last; the texts of a .jsonl."""
        for number, text in enumerate(_lines_of(path), start=1):
            line = Line(path, number, text)
            if not has_json_lines(path):
                yield line
            elif text.strip():
                yield Line(path, number, _json_text(line, self.text_key))


def _lines_of(path: Path) -> Iterator[str]:
    r"""The lines, each with its "\n" except possibly the last; "\r\n" becomes "\n"."""
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and (problem := content_problem(path, line[:4096])):
                    raise DataError(f"{path}: {problem}")
                yield _decoded(path, number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: cannot be read ({reason})") from None


def _opened(path: Path) -> AbstractContextManager[BinaryIO | gzip.GzipFile]:
    if path == STANDARD_INPUT:
        if sys.stdin is None:
            raise DataError("-: there is no standard input to read")
        return nullcontext(sys.stdin.buffer)
    if stat.S_ISCHR(mode := path.stat().st_mode) or stat.S_ISBLK(mode):  # /dev/zero has no end
        raise DataError(f"{path}: is a device, not a file; - reads standard input")
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")


def _decoded(path: Path, number: int, line: bytes) -> str:
    if b"\0" in line:
        raise DataError(f"{path}, line {number}: contains a NUL byte, so it is not UTF-8 text; omit the file")
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x}"
        raise DataError(
            f"{path}, line {number}: not UTF-8 text ({byte}); omit it, or convert it, {encoding_advice(path, line)}"
        ) from None
    return f"{text[:-2]}\n" if text.endswith("\r\n") else text


def _expand(source: str, exclude: Path | None) -> list[Path]:
    path = Path(source)
    if path == STANDARD_INPUT:
        return [path]
    if os.path.isdir(path):  # noqa: PTH112 (Path.is_dir raises for a long name)
        found = sorted(file for file in _walk(path, exclude) if not _why_left_out(file))
        if not found:
            left_out = _describe_left_out(source, exclude).partition(": ")[2]
            others = f"; {left_out}" if left_out else ""
            raise DataError(f"{source}: no {', '.join(SUFFIXES)} file (or .gz of one) in this folder{others}")
        return found
    name = source[:_MAX_NAME_LENGTH] + "..." * (len(source) > _MAX_NAME_LENGTH)  # perhaps the text itself
    try:
        path.lstat()  # also a pipe: --data <(zcat a.gz), and a broken link, which fails when it is read
    except (FileNotFoundError, NotADirectoryError):
        matches = sorted(glob.glob(source, recursive=True))  # noqa: PTH207 (patterns may be absolute)
        if not matches:
            raise DataError(f"{name}: no such file or folder") from None
        return [file for match in matches for file in _expand(match, exclude)]
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from None
    if how := how_to_convert(path):
        raise DataError(f"{source}: {how}")
    return [path]


def _walk(folder: Path, exclude: Path | None) -> Iterator[Path]:
    """Files in `folder`, except in hidden folders (.git) and behind links to folders, which may form cycles."""
    skipped = exclude.resolve() if exclude else None
    for root, folders, names in os.walk(folder, onerror=_raise_unreadable):
        parent = Path(root)
        folders[:] = [name for name in folders if not name.startswith(".") and (parent / name).resolve() != skipped]
        yield from (parent / name for name in names)


def _why_left_out(path: Path) -> str:
    """Why a file of a folder is not read: its suffix, or what it is; empty if it is read."""
    if path.name.startswith("."):  # ._notes.txt
        return "hidden"
    if (kind := suffix(path)) not in SUFFIXES:
        return kind if 1 < len(kind) <= _MAX_SUFFIX_LENGTH else "without a suffix"
    try:
        return "" if stat.S_ISREG(path.stat().st_mode) else "not a file"  # a pipe would wait for its writer
    except OSError:  # a broken link, which fails when it is read
        return ""


def _describe_left_out(folder: str, exclude: Path | None) -> str:
    counts = Counter(filter(None, map(_why_left_out, _walk(Path(folder), exclude))))
    shown = [f"{count:,} {kind}" for kind, count in counts.most_common(_MAX_KINDS)]
    if rest := counts.total() - sum(count for _, count in counts.most_common(_MAX_KINDS)):
        shown.append(f"{rest:,} others")
    return f"{folder}: left out {', '.join(shown)} (docs/train.md)" if shown else ""


def _raise_unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename}: cannot be read ({error.strerror})")


def _documents(lines: Iterator[Line]) -> Iterator[bytes]:
    """Documents without the blank lines around them, possibly empty."""
    buffer = bytearray()  # a document may be the whole corpus: a list of lines would take seven times its size
    blank = 0
    for line in lines:
        buffer += line.text.encode()
        blank = blank + 1 if line.text == "\n" else 0
        if blank == 2:
            yield bytes(buffer.strip(b"\n"))
            buffer.clear()
    yield bytes(buffer.strip(b"\n"))


def _json_text(line: Line, key: str) -> str:
    try:
        row = json.loads(line.text)
    except (ValueError, RecursionError):
        row = None
    text = row.get(key) if isinstance(row, dict) else None
    if isinstance(text, str) and not _LONE_SURROGATE.search(text):
        return text
    raise DataError(
        f'{line.location}: must be a JSON object with a valid Unicode string under "{key}" (--text-key names another)'
    )
