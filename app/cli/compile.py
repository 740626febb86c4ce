"""python -m app compile: builds the native kernels ahead of time, or checks whether they are built.

Imports only the standard library and the builder, so that the build stage of a container needs nothing else.
"""

from __future__ import annotations

import argparse
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from app.engine.cpu.toolchain.builder import TIMEOUT_SECONDS, Compiler, build, check_loads, find, need_cache_directory
from app.engine.cpu.toolchain.cpu_target import (
    BuildError,
    CompilerNotFound,
    KernelsUnavailable,
    UnsupportedCpu,
    levels_of,
    this_level,
)
from app.engine.cpu.toolchain.library_cache import BuildRecipe


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 built; 1 failed (--check: the service would not use them); 2 no compiler, or unsupported CPU."""
    options = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a partial build is removed
    directory: Path | None = options.cache_dir
    try:
        if options.check:
            return _check(directory)
        for level in levels_of(platform.machine()) if options.all_levels else (this_level(),):
            _build(BuildRecipe(level=level), need_cache_directory(directory), options)
    except (UnsupportedCpu, CompilerNotFound) as error:
        if not options.quiet:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


class PlainParser(argparse.ArgumentParser):
    """One-line errors as in model/command_line.py, which needs packages: a build stage has none."""

    def error(self, message: str) -> NoReturn:
        """One line, and exit code 2."""
        self.exit(2, f"error: {' '.join(message.split())}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = PlainParser(
        prog="inkstream compile",
        description="Build the native kernels, which are faster than torch. Does nothing if they are already built.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cache-dir",
        type=_directory,
        metavar="DIR",
        help="cache directory, the same as for serve (default: INKSTREAM_CACHE_DIR, or ~/.cache/inkstream)",
    )
    parser.add_argument(
        "--all-levels", action="store_true", help="build for every supported CPU level: for container images"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="build nothing; exit with 0 if the service would use native kernels, otherwise with 1",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
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


def _build(recipe: BuildRecipe, directory: Path, options: argparse.Namespace) -> None:
    """Builds and reports progress. Raises BuildError."""
    state = "already built"

    def announce(compiler: Compiler) -> None:
        nonlocal state
        state = "built"
        print(
            f"building native kernels ({recipe.level.name}, {compiler.version}); this takes a minute or so", flush=True
        )

    library = build(recipe, directory, seconds=options.time_limit, announce=announce)
    if not options.quiet:
        print(f"{recipe.level.name}: {state}: {library}")


def _check(directory: Path | None) -> int:
    try:
        level = this_level().name
        library = find(directory)
        if library:
            check_loads(library)
    except KernelsUnavailable as error:
        print(f"using torch: {error}")
        return 1
    if library is None:
        print(f"using torch: no native kernels ({level}) are built; run inkstream compile")
        return 1
    print(f"using native kernels ({level}): {library}")
    return 0
