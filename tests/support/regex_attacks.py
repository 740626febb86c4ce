r"""Texts that make a regular expression backtrack, derived from the expression.

An attack is a prefix that leads to a repetition, many copies of what the repetition matches, and an end that does not
match: "a a a a ...;" attacks `(\w+\s?)+!`. The scan of the pattern is crude. It finds common forms of catastrophic
backtracking, not all: a pattern that passes is not proven safe.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product

_KINDS = ("a", "A", "1", " ", "\n", "!", "'", "_", "/", "\u4e2d", "\u0301", "\u00e9")
_PUMPS = (*_KINDS, "a ", "a1", "1a", "'s", "a\n", " \n")
_ENDS = ("", "\x00", "!", "a", "1", "\n", "\u4e2d\x00")
_CLASSES = {"s": " ", "S": "a", "d": "1", "D": "a", "w": "a", "W": "!", "h": "a", "H": "z"}
_CLASSES |= {"n": "\n", "r": "\r", "t": "\t"}
_PROPERTIES = {"L": "a", "Lu": "A", "Ll": "a", "Lt": "\u01c5", "Lm": "\u02b0", "Lo": "\u4e2d"}
_PROPERTIES |= {"N": "1", "Nd": "1", "M": "\u0301", "P": "!", "S": "+", "Z": " ", "Han": "\u4e2d"}


@dataclass(frozen=True, slots=True)
class Attack:
    """start + pump * n + end."""

    start: str
    pump: str
    end: str

    def text(self, length: int) -> str:
        """A text of about `length` characters."""
        return self.start + self.pump * max(1, length // len(self.pump)) + self.end


def attacks(pattern: str) -> list[Attack]:
    """Runs of every kind of character, and of the pattern's own parts, with ends that may not match."""
    found, whole = _derived(pattern)
    derived = list(dict.fromkeys(found))[:64]
    pumps = [("", pump) for pump in _PUMPS] + derived
    pumps += [("", first + second) for (_, first), (_, second) in product(derived[:8], repeat=2)]
    # The engine gives up early if a text lacks a character that every match needs; the last end has them all.
    ends = (*_ENDS, f"\x00{whole[:_MAX_TEXT]}\x00{''.join(dict.fromkeys(whole))[:_MAX_TEXT]}")
    return [Attack(start, pump, end) for start, pump in dict.fromkeys(pumps) for end in ends]


_ESCAPE = r"\\[pP]\{[^}]*\}|\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\."
_CHARACTER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_ATOM = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:{_ESCAPE}|[^\]\\])*\]|\(\?[^:=!>)]*[:=!>]?|\{{\d*,?\d*\}}|.", re.DOTALL)
_MAX_TEXT = 64


def _derived(pattern: str) -> tuple[list[tuple[str, str]], str]:
    """(What parts of the pattern may match, each with what may match before it; what all of it may match)."""
    text, found = "", list[tuple[str, str]]()
    groups, alternative = [], 0

    def add(start: int) -> None:
        found.append((text[:start][-_MAX_TEXT:], text[start:][:_MAX_TEXT]))

    for atom in _ATOM.findall(pattern):
        if atom[0] == "(":
            groups.append(len(text))
            alternative = len(text)
        elif atom in ("|", ")"):
            add(alternative)
            if atom == ")" and groups:
                add(groups.pop())
            alternative = len(text)
        elif atom[0] not in "*+?{^$":
            text += _example(atom)
            add(len(text) - len(_example(atom)))
    return [(before, pump) for before, pump in found if pump], text


def _example(atom: str) -> str:
    """A character that a class, an escape or another atom matches; empty for an assertion."""
    if atom[0] == "[" and len(atom) > 1:
        members = "".join(map(_example, _CHARACTER.findall(atom[1:-1].removeprefix("^"))))
        return members[:1] if atom[1] != "^" else next((c for c in "a1! \n\u4e2d" if c not in members), "~")
    if atom[0] != "\\" or len(atom) == 1:
        return "a" if atom == "." else atom
    match atom[1]:
        case "p" | "P" if len(atom) > 2:
            name = atom[3:-1]
            known = _PROPERTIES.get(name.lstrip("^"), "a")
            return known if (atom[1] == "P") == name.startswith("^") else "a" if known == "!" else "!"
        case "u" | "x" if len(atom) > 2:
            return chr(int(atom[2:], 16))
        case "b" | "B" | "A" | "z" | "Z" | "G":
            return ""
    return _CLASSES.get(atom[1], atom[1])
