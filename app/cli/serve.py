"""python -m app serve: starts the service; its flags are generated from the fields of Settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

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
        if first["type"] == "literal_error":
            raise StartError(f"{source}{_not_a_choice(names[0], str(first['input']))}") from None
        raise StartError(f"{source}{first['msg'].removeprefix('Value error, ')}") from None


def _not_a_choice(name: str, value: str) -> str:
    choices = get_args(Settings.model_fields[name].annotation)
    close = get_close_matches(value.strip().lower(), choices, n=1, cutoff=0.75)
    return f"{value[:60]!r} is not one of {', '.join(choices)}{f'; did you mean {close[0]}?' if close else ''}"


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
    "--model": "--weights",
    "--api-key": "--keys-file",
    "--ctx-size": "--max-context",
    "--max-model-len": "--max-context",
    "--max-num-seqs": "--max-running",
    "--max-num-batched-tokens": "--tokens-per-step",
    "--data-parallel-size": "--replicas",
    "--listen": "--host",
}
"""Flags of vLLM and llama.cpp."""
_EXAMPLES = """examples:
  inkstream serve --open                  the model in weights/, and its page
  inkstream serve --weights DIR --port 8001
  inkstream serve --host 0.0.0.0 --keys-file keys.json

Each flag is also a variable: INKSTREAM_PORT=8001 is --port 8001."""
_VALUES = {"host": "HOST", "port": "PORT", "keys_file": "FILE", "allowed_hosts": "NAMES", "allow_origin": "ORIGINS",
           "compare_origin": "ORIGINS",
           "gpu_memory_utilization": "SHARE"}  # fmt: skip


def build_parser(*, with_help: bool = True) -> argparse.ArgumentParser:
    """The parser of this verb; `with_help`: whether --help tells the meaning of each flag, which takes time to read."""
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
            is_flag = field.annotation is bool
            options: dict[str, Any] = (
                {"action": "store_const", "const": True} if is_flag else {"metavar": _placeholder(name, field)}
            )
            group.add_argument(flag(name), help=_help(field, meanings.get(name, "")), **options)
    return parser


def _help(field: FieldInfo, meaning: str) -> str:
    has_default = field.annotation is not bool and field.default not in (None, "")
    default = f"{field.default:g}" if isinstance(field.default, float) else field.default
    return (f"{meaning} (default: {default})" if has_default else meaning).replace("%", "%%")


def _placeholder(name: str, field: FieldInfo) -> str:
    """The values to choose from, or the kind and unit of the value."""
    if get_origin(field.annotation) is Literal:
        return f"{{{','.join(get_args(field.annotation))}}}"
    if name in _VALUES:
        return _VALUES[name]
    if field.annotation is float:
        return "SECONDS"
    return "BYTES" if name.endswith("_bytes") else "N" if field.annotation is int else "DIR"
