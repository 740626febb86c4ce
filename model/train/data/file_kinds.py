"""Which files are training text, by their names and first bytes, and how to convert the others."""

from __future__ import annotations

import codecs
import re
import shlex
from pathlib import Path

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown")
LINE_SUFFIXES = (".jsonl", ".ndjson")
"""Each line is a JSON object with one text."""
SUFFIXES = (*TEXT_SUFFIXES, *LINE_SUFFIXES)
"""What is read of a folder, in any case, each also with .gz."""

_PANDOC = "extract its text, for example with pandoc -t plain"
_UNPACK = "unpack it, and give the folder"
_TABLE = 'write one JSON object per row, with the text under "text", to a .jsonl'
_UNREAD = {
    (".json",): "JSON is not text: use a .jsonl with one object per line, or rename it to .txt",
    (".html", ".htm", ".xhtml"): f"HTML is mostly markup: {_PANDOC}, or rename it to .txt to learn the markup, too",
    (".epub", ".docx", ".doc", ".odt", ".rtf", ".fb2"): f"a document with formatting: {_PANDOC}",
    (".pdf",): "a document with formatting: extract its text, for example with pdftotext",
    (".csv",): f"a table: {_TABLE}, or rename it to .txt",
    (".parquet", ".arrow", ".feather", ".sqlite", ".db", ".xlsx", ".xls"): f"a table: {_TABLE}",
    (".zip", ".tar", ".tgz", ".7z", ".rar"): f"an archive: {_UNPACK}",
    (".xz", ".bz2", ".zst", ".lz4", ".br"): "compressed in a format that is not read: decompress it, or use .gz",
}
"""Suffixes of files that are no text, even if a user names one -> what to do."""
_STARTS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks -> iconv's name. UTF-32 comes first: its mark begins with UTF-16's."""
_MAGIC = {b"%PDF-": ".pdf", b"PK\x03\x04": ".zip", b"\x1f\x8b": "", b"\xfd7zXZ": ".xz"}
"""First bytes of formats that no text begins with -> suffix, which is empty for gzip."""
_ZEROS = {"UTF-32LE": (1, 2, 3), "UTF-32BE": (0, 1, 2), "UTF-16LE": (1,), "UTF-16BE": (0,)}
"""Encoding -> which bytes of each four, or two, are zero in Latin letters."""


def suffix(path: Path) -> str:
    """Suffix of the name in lower case, ignoring .gz."""
    path = Path(path.name.lower())
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def has_json_lines(path: Path) -> bool:
    """Whether each line is a JSON object with one text."""
    return suffix(path) in LINE_SUFFIXES


def how_to_convert(path: Path) -> str:
    """Why a file that a user names is not read, and what to do; empty if it is."""
    return next((how for suffixes, how in _UNREAD.items() if suffix(path) in suffixes), "")


def content_problem(path: Path, start: bytes) -> str:
    """What is wrong with the first bytes of a file, and what to do; empty if they may be UTF-8."""
    if encoding := next((name for mark, name in _STARTS.items() if start.startswith(mark)), ""):
        return f"is {encoding}, not UTF-8: {iconv(path, encoding)}"
    for magic, kind in _MAGIC.items():
        if start.startswith(magic):
            how = how_to_convert(Path(f"x{kind}")) if kind else "compressed by gzip: add .gz to its name"
            return f"is not text, but {how}"
    if encoding := _encoding_of_zeros(start):
        return f"is {encoding}, not UTF-8: {iconv(path, encoding)}"
    return ""


def _encoding_of_zeros(start: bytes) -> str:
    """UTF-16 or UTF-32 without a byte order mark, by where its zero bytes are; empty if there is no such order."""
    for encoding, places in _ZEROS.items():
        width = 4 if "32" in encoding else 2
        whole = start[: len(start) // width * width]
        zeros = [whole[i::width].count(0) for i in range(width)]
        count = len(whole) // width
        others = sum(zeros[i] for i in range(width) if i not in places)
        if count and not others and all(2 * zeros[i] > count for i in places):
            return encoding
    return ""


def iconv(path: Path, encoding: str) -> str:
    """The command that converts a file to UTF-8."""
    convert = f"iconv -f {encoding} -t UTF-8"
    if path == Path("-"):
        return f"pipe it through {convert}"
    is_packed = path.suffix.lower() == ".gz"
    plain = path.with_suffix("") if is_packed else path
    old, new = (shlex.quote(str(each)) for each in (path, plain.with_name(f"{plain.stem}.utf8{plain.suffix}")))
    return f"zcat {old} | {convert} > {new}" if is_packed else f"{convert} {old} > {new}"


def encoding_advice(path: Path, line: bytes) -> str:
    """How to convert a line that is not UTF-8, whose encoding only its reader can know."""
    letters = len(re.findall(rb"[A-Za-z ]", line))
    guess = "WINDOWS-1252" if 2 * letters > len(line) else "ENCODING"
    known = "if it is Western European" if guess != "ENCODING" else "with the name of its encoding (iconv -l)"
    return f"{known}: {iconv(path, guess)}"
