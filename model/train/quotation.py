"""Text that nobody wrote to be shown, shown as it is: on a terminal, in Markdown. Pure."""

from __future__ import annotations

import re

_MARKUP = re.compile(r"([\\`*_\[\]<>#|~$&])")
_MARKUP_AT_THE_START = re.compile(r"^([-+=])")
_NUMBERED = re.compile(r"^(\d+)([.)])")


def plain(line: str) -> str:
    """One line without what Markdown would take for markup, and without control characters."""
    shown = visible(line.strip()).replace("\t", "\ufffd")
    return _NUMBERED.sub(r"\1\\\2", _MARKUP_AT_THE_START.sub(r"\\\1", _MARKUP.sub(r"\\\1", shown)))


def visible(text: str) -> str:
    """The text without control characters but tabs and line ends: printed, they would command the terminal."""
    return "".join(c if c.isprintable() or c in "\t\n" else "\ufffd" for c in text)


def quoted(text: str) -> str:
    """The text as a quotation, in which its lines stay lines."""
    lines = [plain(line) for line in text.strip("\n").split("\n")]
    return "\n".join(f"> {line}  " if line else ">" for line in lines)
