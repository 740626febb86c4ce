"""Builds the native kernel library with the C++ compiler, or finds one that is already built."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from app.common.cache_directory import CacheError, build_directory, cache_directory
from app.engine.cpu.toolchain.cpu_target import (
    LEVELS,
    BuildError,
    CompilerNotFound,
    KernelsUnavailable,
    UnsupportedCpu,
    runs_here,
    this_level,
)
from app.engine.cpu.toolchain.guarded_subprocess import guarded_command
from app.engine.cpu.toolchain.library_cache import (
    PACKAGED,
    UNIT,
    BuildRecipe,
    find_library,
    remove_old_libraries,
    store_library,
)

_COMPILERS = ("g++", "clang++", "c++")
_HOW_TO_INSTALL = "install one (Debian: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
_MAX_MESSAGE_LENGTH = 300


class Compiler(NamedTuple):
    """A compiler that reports its version."""

    command: tuple[str, ...]
    version: str


def compiler_commands() -> list[tuple[str, ...]]:
    """The compiler that $CXX names, else every compiler on the PATH, best first. Raises CompilerNotFound."""
    if requested := os.environ.get("CXX", "").strip():
        try:
            arguments = shlex.split(requested)
        except ValueError:
            arguments = []
        if not arguments or shutil.which(arguments[0]) is None:
            raise CompilerNotFound(
                f"CXX names {requested!r}, which does not exist: unset CXX, or set it to a C++ compiler"
            )
        return [tuple(arguments)]
    found = [path for name in _COMPILERS if (path := shutil.which(name))]
    if not found:
        raise CompilerNotFound(f"there is no C++ compiler on this machine: {_HOW_TO_INSTALL}")
    return [(path,) for path in found]


def find_compiler() -> Compiler:
    """The first compiler that reports its version. Raises CompilerNotFound."""
    commands = compiler_commands()
    for command in commands:
        # macOS has a c++ stub that only reports that no compiler is installed.
        with contextlib.suppress(BuildError):
            lines = [line for line in run((*command, "--version"), Path.cwd(), 20.0).splitlines() if line.strip()]
            return Compiler(command=command, version=_one_line(lines[0]) if lines else "unknown")
    raise CompilerNotFound(f"{shlex.join(commands[0])} does not work as a compiler: {_HOW_TO_INSTALL}")


def run(command: Sequence[str], folder: Path, seconds: float) -> str:
    """Runs a command and returns its output. Its temporary files go to `folder`; it is killed if this process ends.

    Raises BuildError.
    """
    read_end, guard = os.pipe()
    try:
        process = subprocess.Popen(
            guarded_command(command),
            stdin=read_end,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
        )
    except OSError as error:
        os.close(guard)
        raise BuildError(f"{command[0]} cannot be run ({error.strerror})") from None
    finally:
        os.close(read_end)
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        remedy = "inkstream compile --time-limit gives it more"
        raise BuildError(f"{command[0]} took more than {seconds:g} seconds; {remedy}") from None
    finally:
        os.close(guard)
        process.communicate()
    if process.returncode:
        raise BuildError(_failure_message(command[0], errors.decode("utf-8", "replace"), process.returncode))
    return out.decode("utf-8", "replace")


def _failure_message(name: str, text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), lines[-1] if lines else "")
    if not first and code > 128:
        first = f"killed by signal {code - 128}; is there enough memory?"
    return f"{name} failed: {_one_line(first or f'exit code {code}')}"


def _one_line(line: str) -> str:
    """One line of printable ASCII, truncated to _MAX_MESSAGE_LENGTH."""
    text = " ".join(re.sub(r"[^ -~]+", " ", line).split())
    return text if len(text) <= _MAX_MESSAGE_LENGTH else f"{text[:_MAX_MESSAGE_LENGTH]}..."


TIMEOUT_SECONDS = 600.0
_CHECK_SECONDS = 60.0
_CHECK_SCRIPT = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).ink_sizes()"


def _ignore_compiler(compiler: Compiler) -> None:
    del compiler


def find(cache_dir: Path | None = None) -> Path | None:
    """A library for this machine and these sources, from the cache or from the installation."""
    try:
        name = BuildRecipe(level=this_level()).name
    except UnsupportedCpu:
        return None
    cache = cache_directory(cache_dir)
    return find_library(name, [*([cache] if cache else []), PACKAGED])


def find_or_build(cache_dir: Path | None = None, announce: Callable[[Compiler], None] = _ignore_compiler) -> Path:
    """The library that find() returns, or a new build if there is none. Raises BuildError, UnsupportedCpu."""
    level = this_level()
    if found := find(cache_dir):
        return found
    return build(BuildRecipe(level=level), need_cache_directory(cache_dir), announce=announce)


def need_cache_directory(requested: Path | None) -> Path:
    """The directory that libraries are stored in. Raises BuildError."""
    if directory := cache_directory(requested):
        return directory
    raise BuildError("there is no home directory to store native kernels in: give a directory with --cache-dir")


def check_loads(library: Path) -> None:
    """Raises KernelsUnavailable if the file cannot be loaded."""
    try:
        ctypes.CDLL(str(library)).ink_sizes()
    except (OSError, AttributeError) as error:
        raise KernelsUnavailable(f"{library} does not load ({' '.join(str(error).split())})") from None


def build(
    recipe: BuildRecipe,
    directory: Path,
    *,
    seconds: float = TIMEOUT_SECONDS,
    announce: Callable[[Compiler], None] = _ignore_compiler,
) -> Path:
    """Returns the library of `recipe` in `directory`; compiles it if it is missing. Raises BuildError.

    `announce` is called before the compiler runs. `seconds` limits the compiler, not the wait for another build.
    """
    library = directory / recipe.name
    if find_library(library.name, [directory]):
        return library
    compiler = find_compiler()
    try:
        with build_directory(directory) as folder:
            if not find_library(library.name, [directory]):  # a concurrent build may have finished while this waited
                announce(compiler)
                _build(recipe, library, folder, compiler, seconds)
    except CacheError as error:
        raise BuildError(str(error)) from None
    return library


def _build(recipe: BuildRecipe, library: Path, folder: Path, compiler: Compiler, seconds: float) -> None:
    """Compiles in a temporary folder, and stores the library. Raises BuildError, OSError."""
    built, start = folder / library.name, time.monotonic()
    run((*compiler.command, *recipe.flags, str(recipe.source / UNIT), "-o", str(built)), folder, seconds)
    _check_library(built, recipe, folder)
    details = {
        "compiler": compiler.version,
        "flags": recipe.flags,
        "seconds": round(time.monotonic() - start, 1),
        "built": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    store_library(built, library, details)
    remove_old_libraries(
        library.parent, {library.name, *(BuildRecipe(level=level, source=recipe.source).name for level in LEVELS)}
    )


def _check_library(built: Path, recipe: BuildRecipe, folder: Path) -> None:
    """Loads the library in a subprocess, which may crash, if this machine can run it. Raises BuildError."""
    if not built.is_file():
        raise BuildError("the compiler wrote no library")
    if not runs_here(recipe.level):
        return
    try:
        run((sys.executable, "-I", "-S", "-c", _CHECK_SCRIPT, str(built)), folder, _CHECK_SECONDS)
    except BuildError as error:
        raise BuildError(
            f"the library does not load ({error}): where the disk is mounted noexec, give a directory with --cache-dir"
        ) from None
