"""inkstream completion SHELL: prints a script with which a shell completes the command line.

The script is static, so that completing starts no Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args, get_origin

import shtab

from app.common.settings import Settings
from model.command_line import AUTO, OneLineParser
from model.presets import PRESET_NAMES

SHELLS = ("bash", "zsh", "fish")
_DIRECTORIES = {"cache_dir", "directory", "init", "out", "weights"}
_FILES = {"about", "data", "keys_file", "prompts"}
_CHOICES = {"preset": (*PRESET_NAMES, AUTO)}
_INSTALL = """\
to install it, write it where the shell looks:
  bash  inkstream completion bash > ~/.local/share/bash-completion/completions/inkstream
  zsh   inkstream completion zsh > ~/.zfunc/_inkstream   (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  fish  inkstream completion fish > ~/.config/fish/completions/inkstream.fish
"""


def main(argv: Sequence[str], *, parsers: Callable[[], Mapping[str, argparse.ArgumentParser]]) -> int:
    """Prints the script. `parsers`: those of the other verbs. Exit codes: 0 done, 2 bad arguments."""
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
        epilog=_INSTALL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")
    return parser


def _whole_parser(parsers: Mapping[str, argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """One parser with a subcommand for each verb; its flags know their choices, files and directories."""
    whole = argparse.ArgumentParser(prog="inkstream", description="Serve, complete and train text models.")
    whole.add_argument("--version", "-V", action="store_true", help="print the version")
    verbs = whole.add_subparsers(dest="verb")
    for verb, parser in parsers.items():
        verbs.add_parser(verb, help=parser.description)
        verbs.choices[verb] = parser
        for action in _actions(parser):
            _add_values(action, is_setting=verb == "serve")
    return whole


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)


def _add_values(action: argparse.Action, *, is_setting: bool) -> None:
    """What completes the value of a flag."""
    if is_setting and action.choices is None and action.dest in Settings.model_fields:
        annotation = Settings.model_fields[action.dest].annotation
        action.choices = get_args(annotation) if get_origin(annotation) is Literal else None
    action.choices = action.choices or _CHOICES.get(action.dest)
    if action.choices is not None or action.nargs == 0:
        return
    if action.dest in _DIRECTORIES or action.metavar == "DIR":
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif action.dest in _FILES or action.metavar == "FILE":
        action.complete = shtab.FILE  # type: ignore[attr-defined]
