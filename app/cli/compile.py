"""python -m app compile: builds the native kernels ahead of time, or checks whether they are built.

Imports only the standard library and the builder, so that the build stage of a container needs nothing else.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from app.engine.cpu.toolchain.builder import TIMEOUT_SECONDS, Compiler, build, check_loads, find, need_cache_directory
from app.engine.cpu.toolchain.cpu_target import (
    BuildError,
    CompilerNotFound,
    KernelsUnavailable,
    UnsupportedCpu,
    levels_to_package,
    this_level,
    this_machine,
)
from app.engine.cpu.toolchain.library_cache import BuildRecipe, read_metadata

_MAX_SECONDS = 86400


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 built; 1 failed (--check: the service would not use them); 2 no compiler, or unsupported CPU."""
    options = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a partial build is removed
    directory: Path | None = options.cache_dir
    try:
        if options.check:
            return _check(directory)
        for level in levels_to_package(*this_machine()) if options.all_levels else (this_level(),):
            _build(BuildRecipe(level=level), need_cache_directory(directory), options)
    except (UnsupportedCpu, CompilerNotFound) as error:
        if not options.quiet:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


class _Parser(argparse.ArgumentParser):
    """One-line errors like those of model/command_line.py, which is not available in a build stage."""

    def error(self, message: str) -> NoReturn:
        """One line, and exit code 2."""
        unknown = next((word for word in message.split() if word.startswith("--")), "")
        close = get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}? " if close and message.startswith("unrecognized") else ""
        self.exit(2, f"error: {' '.join(message.split())}; {hint}see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = _Parser(
        prog="inkstream compile",
        description="Build the native kernels, which are faster than torch. Does nothing if they are already built.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cache-dir",
        type=_directory,
        metavar="DIR",
        help="cache directory, the same as that of serve (default: INKSTREAM_CACHE_DIR, or ~/.cache/inkstream)",
    )
    parser.add_argument(
        "--all-levels", action="store_true", help="build for every supported x86-64 CPU level: for container images"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="build nothing; exit with 0 if the service would use native kernels, otherwise with 1",
    )
    parser.add_argument(
        "--time-limit",
        type=_seconds,
        default=TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="time limit of the compiler for one CPU level (default: %(default)g)",
    )
    parser.add_argument("--quiet", action="store_true", help="print only that a build starts or has failed")
    return parser


def _directory(text: str) -> Path:
    """Raises ArgumentTypeError for an empty name, which would mean the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: give a directory or leave the flag out")
    return Path(text)


def _seconds(text: str) -> float:
    """Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0 and up to {_MAX_SECONDS}, not {text!r}")
    return seconds


def _build(recipe: BuildRecipe, directory: Path, options: argparse.Namespace) -> None:
    """Builds and reports progress. Raises BuildError."""
    level, is_new = recipe.level.name, False

    def announce(compiler: Compiler) -> None:
        nonlocal is_new
        is_new = True
        print(f"building native kernels ({level}, {compiler.version}); this takes a minute or so", flush=True)

    library = build(recipe, directory, seconds=options.time_limit, announce=announce)
    if not options.quiet:
        print(f"{level}: {'built' if is_new else 'already built'}")
        _describe(library)


def _check(directory: Path | None) -> int:
    try:
        level = this_level().name
    except UnsupportedCpu as error:
        print(f"using torch: {error}")
        return 1
    if library := find(directory):
        try:
            check_loads(library)
        except KernelsUnavailable as error:
            print(f"using torch: {error}")
            return 1
        print(f"using native kernels ({level})")
        _describe(library)
        return 0
    print(f"using torch: no native kernels ({level}) are built; run inkstream compile")
    return 1


def _describe(library: Path) -> None:
    build_info = read_metadata(library) or {}
    lines = {
        "file": library,
        "size": f"{int(build_info.get('bytes', 0)) >> 10} KiB",
        "compiler": build_info.get("compiler", "unknown"),
        "flags": " ".join(build_info.get("flags", ())),
        "took": f"{build_info.get('seconds', 0)} s",
    }
    for label, text in lines.items():
        print(f"  {label:<10}{text}")
