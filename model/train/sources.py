"""Files, folders, patterns and standard input to texts: whole documents, or numbered lines. Knows no tokens.

A document is what two blank lines, a file's end or a line of .jsonl ends.
"""

from __future__ import annotations

import glob
import gzip
import json
import re
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SUFFIXES = (".txt", ".md", ".jsonl")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class DataError(ValueError):
    """Training data that cannot be used; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file."""

    where: str
    """File and line number, for messages."""
    text: str


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


def read_lines(sources: Sequence[str]) -> list[Line]:
    """Lines of the same sources that are not blank; of a .jsonl the texts. Raises DataError."""
    lines: list[Line] = []
    for path in (path for source in sources for path in _expand(source)):
        for number, line in enumerate(_read(path).split("\n"), start=1):
            text = _json_text(path, line) if _suffix(path) == ".jsonl" and line.strip() else line
            if text.strip(" "):
                lines.append(Line(f"{path}, line {number}", text))
    if not lines:
        raise DataError(f"no text in {', '.join(sources)}")
    return lines


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
