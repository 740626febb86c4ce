"""Lists the names that a regex of patternProperties matches, if they are few."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_NAMES = 32
"""Longer lists stay patterns: each name becomes an optional property, which the parser tries at every comma."""

_CLASSES = {"d": "0123456789"}
_REPEATED = re.compile(r"\{(\d{1,3})(?:,(\d{1,3}))?\}")


class _NotFiniteError(Exception):
    """The regex matches too many names, or uses syntax that this module does not read."""


def names_of(pattern: str) -> list[str] | None:
    """The names that `pattern` matches, in the order of the pattern; None if there are many, or if it is not clear.

    Reads characters, escapes, classes, groups, alternatives and bounded repetitions between ^ and $.
    """
    try:
        reader = _Reader(pattern)
        names = list(dict.fromkeys(reader.alternatives(anchored=True)))
    except _NotFiniteError:
        return None
    return names if reader.is_at_end else None


class _Reader:
    """Recursive descent over a regex; every method returns the texts that its part matches."""

    def __init__(self, pattern: str) -> None:
        self._rest = pattern
        self._depth = 0

    @property
    def is_at_end(self) -> bool:
        return not self._rest

    def alternatives(self, *, anchored: bool) -> list[str]:
        """Alternatives separated by |; each of them between ^ and $ if `anchored`."""
        found: list[str] = []
        while True:
            if anchored:
                self._expect("^")
            found = _limited([*found, *self._sequence()])
            if anchored:
                self._expect("$")
            if not self._take("|"):
                return found

    def _sequence(self) -> list[str]:
        found = [""]
        while self._rest and self._rest[0] not in "|)$":
            part = self._repeated(self._part())
            found = _limited([left + right for left in found for right in part])
        return found

    def _part(self) -> list[str]:
        if self._take("("):
            if self._take("?"):
                self._expect(":")
            self._depth += 1
            if self._depth > 8:
                raise _NotFiniteError
            found = self.alternatives(anchored=False)
            self._depth -= 1
            self._expect(")")
            return found
        if self._take("["):
            return self._class()
        if self._rest[0] in "^.*+?{}]":
            raise _NotFiniteError
        return list(self._character())

    def _class(self) -> list[str]:
        found: list[str] = []
        while not self._take("]"):
            if not self._rest or self._rest[0] in "^[&":  # negations; Rust's set operations
                raise _NotFiniteError
            first = self._character()
            if self._rest[:1] == "-" and self._rest[1:2] not in ("]", ""):
                self._expect("-")
                last = self._character()
                if len(first) != 1 or len(last) != 1 or not 0 <= ord(last) - ord(first) < 4 * MAX_NAMES:
                    raise _NotFiniteError
                found += map(chr, range(ord(first), ord(last) + 1))
            else:
                found += first
        return _limited(found)

    def _character(self) -> str:
        """One character, or the characters of an escaped class."""
        character, self._rest = self._rest[:1], self._rest[1:]
        if character != "\\":
            return character
        escaped, self._rest = self._rest[:1], self._rest[1:]
        if escaped in _CLASSES:
            return _CLASSES[escaped]
        if not escaped or escaped.isalnum() or not escaped.isascii():
            raise _NotFiniteError
        return escaped

    def _repeated(self, part: list[str]) -> list[str]:
        if self._take("?"):
            low, high = 0, 1
        elif match := _REPEATED.match(self._rest):
            self._rest = self._rest[match.end() :]
            low = int(match[1])
            high = int(match[2] or match[1])
        else:
            return part
        if self._rest[:1] in ("?", "+", "*", "{") and self._rest:
            raise _NotFiniteError
        return _limited(list(_powers(part, low, high)))

    def _take(self, text: str) -> bool:
        if not self._rest.startswith(text):
            return False
        self._rest = self._rest[len(text) :]
        return True

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise _NotFiniteError


def _powers(part: list[str], low: int, high: int) -> Iterator[str]:
    power = [""]
    for count in range(high + 1):
        if count >= low:
            yield from power
        if count < high:
            power = _limited([left + right for left in power for right in part])


def _limited(names: list[str]) -> list[str]:
    names = list(dict.fromkeys(names))
    if len(names) > MAX_NAMES:
        raise _NotFiniteError
    return names
