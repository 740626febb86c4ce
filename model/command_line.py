"""Command-line parsing: a parser that reports an error in one line, and the value types of flags."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable
from typing import Literal, NoReturn, get_args

from model.files import one_line
from model.presets import PRESET_NAMES


class OneLineParser(argparse.ArgumentParser):
    """argparse prints its usage, a dozen lines for some verbs, before it says what is wrong."""

    def error(self, message: str) -> NoReturn:
        """One line, and exit code 2."""
        self.exit(2, one_line(f"error: {message}; {self.prog} --help tells how it is called") + "\n")


Optimizer = Literal["muon", "adamw"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
DTYPES = ("float32", "bfloat16", "float16")
"""Of weights on disk; float16 is none to train in, its smallest numbers are too large."""
AUTO = "auto"
"""The preset that depends on text, device and time."""


def preset_name(name: str) -> str:
    """A preset that there is; of one that is not, the message names the nearest."""
    names = (*PRESET_NAMES, AUTO)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    meant = f", did you mean {near[0]}?" if near else ";"
    raise argparse.ArgumentTypeError(f"no preset is called {name!r}{meant} there are {', '.join(names)}")


def path(text: str) -> str:
    """Of a file or folder. An empty one, of a variable that is not set, would be the working directory, or none."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a file or folder, . for the one that you are in")
    return text


def _word(pattern: str, what: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return text

    return parse


license_id = _word(r"[a-z0-9][a-z0-9.+-]*", "an identifier such as mit or cc0-1.0")
language = _word(r"[a-z]{2,3}(-[A-Za-z0-9]+)*", "a code such as en or pt-BR")


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


count = _number(int, lambda x: x >= 1, "a whole number of at least 1")
vocabulary = _number(int, lambda x: 1 <= x <= 2**20, "a whole number from 1 to 1048576")
"""tokenizers makes room for all of it at once, and ends the process, without a word to us, where there is none."""
windows = _number(int, lambda x: 1 <= x <= 2**16, "a whole number from 1 to 65536")
whole = _number(int, lambda x: 0 <= x < 2**63, "a whole number from 0 to 2^63 - 1")
positive = _number(float, lambda x: 0 < x < float("inf"), "a number above 0")
not_negative = _number(float, lambda x: 0 <= x < float("inf"), "a number of at least 0")
small_share = _number(float, lambda x: 0 < x <= 0.3, "a number above 0 and up to 0.3")
decay = _number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
share = _number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
