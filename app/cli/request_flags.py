"""Flags for the fields of a request, made from the request's JSON schema so that none is forgotten. Knows no HTTP."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}


def add_flags(parser: argparse._ActionsContainer, schema: Mapping[str, Any], without: set[str]) -> list[str]:
    """One flag for every property of `schema` but those in `without`. Returns the names of the fields."""
    names = [name for name in schema["properties"] if name not in without]
    for name in names:
        described = schema["properties"][name]
        how = _how(name, [part for part in described.get("anyOf", [described]) if part.get("type") != "null"])
        help_text = " ".join(filter(None, [described.get("description", ""), _HINTS.get(name, "")]))
        parser.add_argument(f"--{name.replace('_', '-')}", help=help_text.replace("%", "%%"), **how)
    return names


def given_fields(options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """What was said on the command line, as the service reads it."""
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return {name: dict(value) if name in _PAIRS else value for name, value in given.items()}


def _how(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """argparse's words for a field that may be of these types."""
    types = {part.get("type", "string") for part in parts}
    if name in _OWN:
        return _OWN[name]
    if types == {"boolean"}:
        return {"action": "store_const", "const": True}
    if "array" in types:
        items = next(part["items"] for part in parts if part.get("type") == "array")
        return {"action": "append", **_SIMPLE[items.get("type", "string")]}
    assert len(types) == 1, f"{name} needs a way to be written on a command line"
    return _SIMPLE[types.pop()]


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text[:60]!r}") from None


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"must be a number, and a finite one, not {text[:60]!r}")
    return number


def _stop(text: str) -> str:
    return re.sub(r"\\[nrt\\]", lambda found: _ESCAPES[found.group()], text)


def _pair(text: str) -> tuple[str, float]:
    token, _, bias = text.rpartition("=")
    if not token:
        raise argparse.ArgumentTypeError(f"must be ID=BIAS, such as 123=-5, not {text[:60]!r}")
    return str(_whole(token)), _finite(bias)


def _content(text: str) -> str:
    """The text itself, or @ and the file that has it."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[1:]}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise argparse.ArgumentTypeError(f"{text[1:]}: is not UTF-8") from None


def _json(text: str) -> Any:
    try:
        return json.loads(_content(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from None


_SIMPLE: dict[str, dict[str, Any]] = {
    "integer": {"type": _whole, "metavar": "N"},
    "number": {"type": _finite, "metavar": "X"},
    "string": {"metavar": "TEXT"},
}
_OWN: dict[str, dict[str, Any]] = {
    "source": _SIMPLE["string"],
    "stop": {"action": "append", "type": _stop, "metavar": "TEXT"},
    "logit_bias": {"action": "append", "type": _pair, "metavar": "ID=BIAS"},
    "json_schema": {"type": _json, "metavar": "JSON"},
    "grammar": {"type": _content, "metavar": "TEXT"},
}
_PAIRS = {"logit_bias"}
_HINTS = {
    "stop": r"May be repeated; \n, \t and \\ are read.",
    "stop_token_ids": "May be repeated.",
    "logit_bias": "May be repeated: 123=-5. Of one id, the last counts.",
    "json_schema": "Or @FILE.",
    "grammar": "Or @FILE.",
}
