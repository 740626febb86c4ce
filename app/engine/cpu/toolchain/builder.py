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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from app.engine.cpu.toolchain.cpu_target import (
    X86_LEVELS,
    BuildError,
    NoCompiler,
    UnsupportedCpu,
    Unusable,
    runs_here,
    this_level,
)
from app.engine.cpu.toolchain.guarded_subprocess import leashed
from app.engine.cpu.toolchain.library_cache import (
    ABI,
    PACKAGED,
    UNIT,
    BuildRecipe,
    cache_directory,
    find_library,
    put_library,
    tidy,
    workplace,
)

_NAMES = ("g++", "clang++", "c++")
_HOW_TO_GET_ONE = "install one (Debian: apt install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install)"
_MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """A compiler that answers."""

    command: tuple[str, ...]
    version: str


def compiler_commands(environment: Mapping[str, str]) -> list[tuple[str, ...]]:
    """What $CXX names, else every compiler on the PATH, best first. Raises NoCompiler."""
    path = environment.get("PATH")
    if asked := environment.get("CXX", "").strip():
        try:
            words = shlex.split(asked)
        except ValueError:
            words = []
        if not words or shutil.which(words[0], path=path) is None:
            raise NoCompiler(f"CXX names {asked!r}, which is not there: unset CXX, or name a C++ compiler")
        return [tuple(words)]
    found: list[tuple[str, ...]] = [(place,) for name in _NAMES if (place := shutil.which(name, path=path))]
    if not found:
        raise NoCompiler(f"there is no C++ compiler on this machine: {_HOW_TO_GET_ONE}")
    return found


def find_compiler(environment: Mapping[str, str] | None = None) -> Compiler:
    """The first compiler that tells its version. Raises NoCompiler."""
    commands = compiler_commands(os.environ if environment is None else environment)
    for command in commands:
        # macOS has a c++ that only says that there is none.
        with contextlib.suppress(BuildError):
            lines = [line for line in run((*command, "--version"), Path.cwd(), 20.0).splitlines() if line.strip()]
            return Compiler(command=command, version=_tidy(lines[0]) if lines else "unknown")
    raise NoCompiler(f"{shlex.join(commands[0])} is no compiler that works: {_HOW_TO_GET_ONE}")


def run(command: Sequence[str], folder: Path, seconds: float) -> str:
    """What the command prints; its temporary files go to `folder`. It does not outlive us. Raises BuildError."""
    end, leash = os.pipe()
    try:
        process = subprocess.Popen(
            leashed(command),
            stdin=end,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
        )
    except OSError as error:
        os.close(leash)
        raise BuildError(f"{command[0]} cannot be run ({error.strerror})") from None
    finally:
        os.close(end)
    try:
        out, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        more = "inkstream compile --time-limit gives it more"
        raise BuildError(f"{command[0]} took more than {seconds:g} seconds; {more}") from None
    finally:
        os.close(leash)
        process.communicate()
    if process.returncode:
        raise BuildError(_complaint(command[0], errors.decode("utf-8", "replace"), process.returncode))
    return out.decode("utf-8", "replace")


def _complaint(name: str, text: str, code: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if re.search(r"\berror\b", line, re.IGNORECASE)), lines[-1] if lines else "")
    if not first and code > 128:
        first = f"it was killed by signal {code - 128}; is there enough memory?"
    return f"{name} failed: {_tidy(first or f'exit code {code}')}"


def _tidy(line: str) -> str:
    """One line of printable ASCII, and not a long one."""
    text = " ".join(re.sub(r"[^ -~]+", " ", line).split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


TIMEOUT_SECONDS = 600.0
_TRY_SECONDS = 60.0
_TRY = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ink_abi())"


def _announce_nothing(compiler: Compiler) -> None:
    del compiler


def find(cache_dir: Path | None = None) -> Path | None:
    """A library for this machine and these sources: in the cache, or one that came with the installation."""
    try:
        name = BuildRecipe(level=this_level()).name
    except UnsupportedCpu:
        return None
    cache = cache_directory(cache_dir)
    return find_library(name, [*([cache] if cache else []), PACKAGED])


def find_or_build(cache_dir: Path | None = None, announce: Callable[[Compiler], None] = _announce_nothing) -> Path:
    """The library that find() finds, which is built where there is none. Raises BuildError, UnsupportedCpu."""
    level = this_level()
    if found := find(cache_dir):
        return found
    return build(BuildRecipe(level=level), need_cache_directory(cache_dir), announce=announce)


def need_cache_directory(asked: Path | None) -> Path:
    """Where libraries are to be kept. Raises BuildError."""
    if directory := cache_directory(asked):
        return directory
    raise BuildError("there is no home directory to keep native kernels in: give a directory with --cache-dir")


def check_loads(library: Path) -> None:
    """Raises Unusable for a file that cannot be loaded here, or has another interface."""
    try:
        abi = ctypes.CDLL(str(library)).ink_abi()
    except (OSError, AttributeError) as error:
        raise Unusable(f"{library} does not load ({' '.join(str(error).split())})") from None
    if abi != ABI:
        raise Unusable(f"{library} has the interface {abi}, not {ABI}")


def build(
    recipe: BuildRecipe,
    directory: Path,
    *,
    seconds: float = TIMEOUT_SECONDS,
    announce: Callable[[Compiler], None] = _announce_nothing,
) -> Path:
    """The library of `recipe` in `directory`, compiled if it is not there. Leaves nothing else. Raises BuildError.

    `announce` is called before the compiler runs. `seconds` bound the compiler, not the wait for another build.
    """
    library = directory / recipe.name
    if find_library(library.name, [directory]):
        return library
    compiler = find_compiler()
    with workplace(directory) as folder:
        if find_library(library.name, [directory]):  # the build that we waited for has made it
            return library
        announce(compiler)
        built, began = folder / library.name, time.monotonic()
        run((*compiler.command, *recipe.flags, str(recipe.source / UNIT), "-o", str(built)), folder, seconds)
        _check(built, recipe, folder)
        facts = {
            "compiler": compiler.version,
            "flags": recipe.flags,
            "seconds": round(time.monotonic() - began, 1),
            "built": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        put_library(built, library, facts)
        tidy(directory, {library.name, *(BuildRecipe(level=level, source=recipe.source).name for level in X86_LEVELS)})
    return library


def _check(built: Path, recipe: BuildRecipe, folder: Path) -> None:
    """That it loads, in a process that may fail, where this machine can run it. Raises BuildError."""
    if not built.is_file():
        raise BuildError("the compiler wrote no library")
    if not runs_here(recipe.level):
        return
    try:
        abi = run((sys.executable, "-I", "-S", "-c", _TRY, str(built)), folder, _TRY_SECONDS).strip()
    except BuildError as error:
        raise BuildError(
            f"the library does not load ({error}): where the disk is mounted noexec, give a directory with --cache-dir"
        ) from None
    if abi != str(ABI):
        raise BuildError(
            f"the library has interface {abi}, not {ABI}: app/engine/cpu/toolchain/library_cache.py and {UNIT} differ"
        )
