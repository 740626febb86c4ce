"""python -m app serve: starts the service; its flags are generated from the fields of Settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from app.cli.complete import CLIENT_KEY
from app.common import fault_injection, logs
from app.common.settings import Settings
from app.server import StartError, serve
from model.command_line import OneLineParser
from model.files import one_line


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 ended by a signal, 1 failed, 2 bad configuration."""
    given = vars(_parser().parse_args(argv))
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
        source = "".join(f"{flag(name)} (INKSTREAM_{name.upper()}): " for name in map(str, first["loc"][:1]))
        raise StartError(f"{source}{first['msg'].removeprefix('Value error, ')}") from None


def _reject_unknown_variables() -> None:
    """Raises StartError for a misspelled variable, which would otherwise be ignored silently."""
    known = {f"INKSTREAM_{name.upper()}" for name in Settings.model_fields}
    for name in sorted(os.environ.keys() - {CLIENT_KEY, fault_injection.VARIABLE}):
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


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="inkstream serve", description="Serve a model over HTTP.", allow_abbrev=False)
    for name, field in Settings.model_fields.items():
        options: dict[str, Any] = (
            {"action": "store_const", "const": True} if field.annotation is bool else {"metavar": "X"}
        )
        parser.add_argument(
            flag(name), help=f"{field.description} (default: {field.default})".replace("%", "%%"), **options
        )
    return parser
