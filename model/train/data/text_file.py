"""One file of text, line by line: compressed or not, with any line ends. Says what a file is that is no text.

Knows no documents. Nothing is held but the line at hand: a file may be larger than the memory.
"""

from __future__ import annotations

import codecs
import gzip
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import BinaryIO

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
