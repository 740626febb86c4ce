"""Fields of a request as flags, generated from its JSON schema; text of a response as a terminal may show it."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}


def add_flags(parser: argparse._ActionsContainer, schema: Mapping[str, Any], without: set[str]) -> list[str]:
    """Adds one flag for every property of `schema` except those in `without`. Returns the names of the fields."""
    field_names = [name for name in schema["properties"] if name not in without]
    for name in field_names:
        field = schema["properties"][name]
        options = _argument_options(name, [part for part in field.get("anyOf", [field]) if part.get("type") != "null"])
        help_text = " ".join(filter(None, [field.get("description", ""), _HELP_SUFFIXES.get(name, "")]))
        parser.add_argument(_flag(name), help=help_text.replace("%", "%%"), **options)
    return field_names


def given_fields(options: argparse.Namespace, field_names: list[str]) -> dict[str, Any]:
    """The fields that were given on the command line, as the service expects them."""
    given = {name: value for name in field_names if (value := getattr(options, name)) is not None}
    return {name: dict(value) if name == "logit_bias" else value for name, value in given.items()}


def with_flags(message: str, field_names: Iterable[str], given: Iterable[str]) -> str:
    """A message of the service, which names fields, with the flags that the user typed or can type.

    A field whose name is a word, such as `stop`, counts only if it was `given`; the message may mean the word.
    """
    names = {name for name in field_names if "_" in name}.union(given) & set(field_names)
    if not names:
        return message
    # Not as a part of another name, a path or a quotation.
    pattern = rf"(?<![\w.'\"-])({'|'.join(sorted(names))})(?![\w'\"-])"
    return re.sub(pattern, lambda found: _flag(found.group()), message)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _argument_options(name: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """add_argument()'s keywords for a field of these types."""
    types = {part.get("type", "string") for part in parts}
    if name in _ARGUMENTS_BY_FIELD:
        return _ARGUMENTS_BY_FIELD[name]
    if types == {"boolean"}:
        return {"action": "store_const", "const": True}
    if "array" in types:
        items = next(part["items"] for part in parts if part.get("type") == "array")
        return {"action": "append", **_ARGUMENTS_BY_TYPE[items.get("type", "string")]}
    assert len(types) == 1, f"{name} has no command line syntax"
    return _ARGUMENTS_BY_TYPE[types.pop()]


def _stop(text: str) -> str:
    return re.sub(r"\\[nrt\\]", lambda found: _ESCAPES[found.group()], text)


def _bias(text: str) -> tuple[str, float]:
    token, _, bias = text.rpartition("=")
    try:
        return str(int(token)), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=BIAS, such as 123=-5, not {text[:60]!r}") from None


def _content(text: str) -> str:
    """The text itself, or the content of the file after @."""
    try:
        return Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text[1:]}: cannot be read ({error.strerror})") from None


def _json(text: str) -> Any:
    try:
        return json.loads(_content(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON ({error})") from None


_ARGUMENTS_BY_TYPE: dict[str, dict[str, Any]] = {
    "integer": {"type": int, "metavar": "N"},
    "number": {"type": float, "metavar": "X"},
    "string": {"metavar": "TEXT"},
}
_ARGUMENTS_BY_FIELD: dict[str, dict[str, Any]] = {
    "source": _ARGUMENTS_BY_TYPE["string"],
    "stop": {"action": "append", "type": _stop, "metavar": "TEXT"},
    "logit_bias": {"action": "append", "type": _bias, "metavar": "ID=BIAS"},
    "json_schema": {"type": _json, "metavar": "JSON"},
    "grammar": {"type": _content, "metavar": "TEXT"},
}
_HELP_SUFFIXES = {
    "stop": r"May be repeated; \n, \t and \\ are escapes.",
    "stop_token_ids": "May be repeated.",
    "logit_bias": "May be repeated: 123=-5. The last one for an id applies.",
    "json_schema": "Or @FILE to read it from a file.",
    "grammar": "Or @FILE to read it from a file.",
}

# Model output must not send control sequences to the terminal.
_CONTROL_CHARACTERS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """The text without control characters, for a terminal."""
    return text.translate(_CONTROL_CHARACTERS)
