"""Command-line parsing: a parser that reports an error in one line, and the value types of flags."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Literal, NoReturn, get_args

from model.files import MODEL_NAME, one_line
from model.presets import PRESET_NAMES


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line; argparse would print the usage first, a dozen lines for some verbs."""

    synonyms: Mapping[str, str] = {}
    """Flags of other programs -> those that do the same here; "" -> the flag for an argument without one."""

    def error(self, message: str) -> NoReturn:
        """Prints one line, which suggests a flag for a misspelled one, and exits with code 2."""
        hint = ";"
        if message.startswith("unrecognized arguments: "):
            words = message.split()[2:]
            flags = [word.partition("=")[0] for word in words if word.startswith("--")]
            flags = flags if words and words[0].startswith("-") else ["", *flags]
            known = list(_flags_of(self))
            close = (self.synonyms.get(flag) or get_close_matches(flag, known, n=1, cutoff=0.7) for flag in flags)
            hint = next((f"; did you mean {x if isinstance(x, str) else x[0]}?" for x in close if x), hint)
        self.exit(2, one_line(f"error: {message}{hint} see {self.prog} --help") + "\n")


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The flags of a parser and of its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _flags_of(subparser)


Optimizer = Literal["muon", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
DTYPES = ("float32", "bfloat16", "float16")
"""Formats of weights on disk; training does not use float16, whose smallest number is too large."""
AUTO = "auto"
"""The preset chosen by text, device and time."""


def preset_name(name: str) -> str:
    """Validates a preset name; the error message suggests the closest one."""
    names = (*PRESET_NAMES, AUTO)
    if name in names:
        return name
    close = get_close_matches(name, names, n=1)
    suggestion = f", did you mean {close[0]}?" if close else ";"
    raise argparse.ArgumentTypeError(f"unknown preset {name!r}{suggestion} available: {', '.join(names)}")


def path(text: str) -> str:
    """Path of a file or folder. Rejects an empty one (an unset variable), which would mean the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a file or folder (. for the current one)")
    return text


def _matching(pattern: str, what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return text

    return parse


model_name = _matching(MODEL_NAME, "a name of letters, digits, _, . and -, such as plays-5m")
license_id = _matching(r"[a-z0-9][a-z0-9.+-]*", "an identifier such as mit or cc0-1.0")
language = _matching(r"[a-z]{2,3}(-[A-Za-z0-9]+)*", "a code such as en or pt-BR")


def _number(kind: Callable[[str], float], allowed: Callable[[float], bool], what: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse


positive_int = _number(int, lambda x: x >= 1, "a whole number of at least 1")
vocabulary_size = _number(int, lambda x: 1 <= x <= 2**20, "a whole number from 1 to 1048576")
"""Bounded: tokenizers allocates the whole vocabulary at once and aborts the process if memory runs out."""
windows = _number(int, lambda x: 1 <= x <= 2**16, "a whole number from 1 to 65536")
non_negative_int = _number(int, lambda x: 0 <= x < 2**63, "a whole number from 0 to 2^63 - 1")
positive_number = _number(float, lambda x: 0 < x < float("inf"), "a number above 0")
non_negative_number = _number(float, lambda x: 0 <= x < float("inf"), "a number of at least 0")
small_fraction = _number(float, lambda x: 0 < x <= 0.3, "a number above 0 and up to 0.3")
decay = _number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
fraction = _number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
