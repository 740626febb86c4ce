"""Builds the library of kernels, or finds the one that was built. Knows no torch, and not what the kernels compute."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from app.engine.cpu.toolchain.cache_key import ABI, UNIT, BuildRecipe
from app.engine.cpu.toolchain.compiler import Compiler, find_compiler, run
from app.engine.cpu.toolchain.cpu_target import X86_LEVELS, UnsupportedCpu, runs_here, this_level
from app.engine.cpu.toolchain.errors import BuildError, Unusable
from app.engine.cpu.toolchain.library_cache import PACKAGED, cache_directory, find_library, put_library, tidy, workplace

TIMEOUT_SECONDS = 600.0
_TRY_SECONDS = 60.0
_TRY = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).ink_abi())"


def _tell_nobody(compiler: Compiler) -> None:
    del compiler


def find(cache_dir: Path | None = None) -> Path | None:
    """A library for this machine and these sources: in the cache, or one that came with the installation."""
    try:
        name = BuildRecipe(level=this_level()).name
    except UnsupportedCpu:
        return None
    cache = cache_directory(cache_dir)
    return find_library(name, [*([cache] if cache else []), PACKAGED])


def find_or_build(cache_dir: Path | None = None, announce: Callable[[Compiler], None] = _tell_nobody) -> Path:
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
    announce: Callable[[Compiler], None] = _tell_nobody,
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
        raise BuildError(f"the library has the interface {abi}, not {ABI}: cache_key.py and {UNIT} do not fit")
