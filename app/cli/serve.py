"""python -m app serve: starts the service; its flags are generated from the fields of Settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from app.common import fault_injection, logs
from app.common.settings import CLIENT_KEY, CLIENT_URL, Settings, field_docstrings, grouped_fields
from app.start import StartError, serve
from model.command_line import OneLineParser
from model.files import one_line


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 ended by a signal, 1 failed, 2 bad configuration."""
    given = vars(build_parser(with_help=not {"-h", "--help"}.isdisjoint(argv)).parse_args(argv))
    try:
        return serve(read_settings(given))
    except StartError as error:
        logs.write_line(one_line(f"error: {error}"))
    return 2


def read_settings(given: Mapping[str, Any]) -> Settings:
    """Settings from flags (None if not given) and the environment. Raises StartError."""
    _reject_unknown_variables()
    try:
        return Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        names = list(map(str, first["loc"][:1]))
        source = "".join(f"{flag(name)} (INKSTREAM_{name.upper()}): " for name in names)
        raise StartError(f"{source}{first['msg'].removeprefix('Value error, ')}") from None


def _reject_unknown_variables() -> None:
    """Raises StartError for a misspelled variable, which would otherwise be ignored silently."""
    known = {f"INKSTREAM_{name.upper()}" for name in Settings.model_fields}
    for name in sorted(os.environ.keys() - {CLIENT_KEY, CLIENT_URL, fault_injection.VARIABLE}):
        # Kubernetes sets INKSTREAM_SERVICE_... and INKSTREAM_PORT_... for a service named inkstream.
        is_kubernetes = name.startswith(("INKSTREAM_SERVICE_", "INKSTREAM_PORT_"))
        if name.upper().startswith("INKSTREAM_") and name.upper() not in known and not is_kubernetes:
            close_matches = get_close_matches(
                name.upper().removeprefix("INKSTREAM_"), map(str.upper, Settings.model_fields), n=1
            )
            hint = f"did you mean INKSTREAM_{close_matches[0]}? " if close_matches else ""
            raise StartError(f"the variable {name} is not a setting: {hint}inkstream serve --help lists the settings")


def flag(name: str) -> str:
    """The flag of a settings field."""
    return f"--{name.replace('_', '-')}"


_SYNONYMS = {
    "": "--weights",
    "--model": "--weights",
    "--api-key": "--keys-file",
    "--ctx-size": "--max-context",
    "--max-model-len": "--max-context",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--tokens-per-step",
    "--data-parallel-size": "--replicas",
    "--listen": "--host",
}
"""Flags of vLLM and llama.cpp; vLLM takes the model without a flag."""
_EXAMPLES = """examples:
  inkstream serve --open                  the model in weights/, and its page
  inkstream serve --weights DIR --port 8001
  inkstream serve --host 0.0.0.0 --keys-file keys.json

Each flag is also a variable: INKSTREAM_PORT=8001 is --port 8001."""
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "DIR", Path | None: "DIR"}


def build_parser(*, with_help: bool = True) -> argparse.ArgumentParser:
    """The parser of this verb; `with_help`: whether --help explains each flag, which takes time to read."""
    meanings = field_docstrings() if with_help else {}
    parser = OneLineParser(
        prog="inkstream serve",
        usage="inkstream serve [--weights DIR] [--port PORT] [options]",
        description="Serve a model over HTTP, with a page in the browser.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.synonyms = _SYNONYMS
    for title, fields in grouped_fields().items():
        group = parser.add_argument_group(title)
        for name, field in fields.items():
            options: dict[str, Any] = {}
            if field.annotation is bool:
                options = {"action": "store_const", "const": True}
            elif get_origin(field.annotation) is Literal:
                options = {"choices": get_args(field.annotation)}
            else:
                options = {"metavar": "FILE" if name == "keys_file" else _METAVARS[field.annotation]}
            default = "" if field.annotation is bool or field.default in (None, "") else f" (default: {field.default})"
            group.add_argument(flag(name), help=(meanings.get(name, "") + default).replace("%", "%%"), **options)
    return parser
