"""Files, folders, patterns and standard input to texts: whole documents, or numbered lines. Knows no tokens.

A document is what two blank lines, a file's end or a line of .jsonl ends.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from model.train.data.text_file import STANDARD_INPUT, DataError, lines_of, suffix

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
