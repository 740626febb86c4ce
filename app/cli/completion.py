"""inkstream completion SHELL: prints a script with which a shell completes the command line.

The script is static, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import shtab

from model.command_line import OneLineParser

_VALUES = {
    "DIR": shtab.DIRECTORY,
    "FILE": shtab.FILE,
    "OUT": shtab.DIRECTORY,
    "PATH": shtab.FILE,
    "SRC": shtab.FILE,
}
"""What a shell completes where a flag's help has this word."""


def main(argv: Sequence[str], *, parsers: Callable[[], Mapping[str, argparse.ArgumentParser]]) -> int:
    """Prints the script. `parsers`: of the other verbs. Exit codes: 0 done, 2 bad arguments."""
    command = build_parser()
    options = command.parse_args(argv)
    if sys.stdout is None:
        command.error("standard output is closed")
    print(shtab.complete(_whole_parser({**parsers(), "completion": command}), options.shell))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = OneLineParser(
        prog="inkstream completion",
        description="Print a script with which a shell completes the command line.",
        epilog="docs/command-line.md says where each shell looks for it",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that the script is for")
    return parser


def _whole_parser(parsers: Mapping[str, argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """One parser with a subcommand for each verb."""
    whole = argparse.ArgumentParser(prog="inkstream", description="Serve, complete and train text models.")
    whole.add_argument("--version", "-V", action="store_true", help="print the version")
    verbs = whole.add_subparsers(dest="verb")
    for verb, parser in parsers.items():
        verbs.add_parser(verb, help=parser.description)
        verbs.choices[verb] = parser
        for action in _actions(parser):
            if action.choices is None and action.metavar in _VALUES:
                action.complete = _VALUES[action.metavar]  # type: ignore[attr-defined]
    return whole


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)
