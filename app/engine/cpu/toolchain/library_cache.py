"""Cache of built kernel libraries: cache key, lookup, storing, cleanup.

A library is a file NAME.so next to a metadata file NAME.so.json, which holds its SHA-256 and build recipe. A loaded
library has all privileges of this process, so the cache ignores files that are incomplete or writable by others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.common.cache_directory import is_trusted_directory, metadata_path, publish, read_metadata, read_trusted
from app.engine.cpu.toolchain.cpu_target import CpuTarget

# The file name includes a hash of everything that the library depends on except the compiler: a machine without one
# (the last stage of a container build) must be able to find the right library.

SOURCE = Path(__file__).parents[1] / "source"
UNIT = "inkstream.cpp"
"""The one file that is compiled; it includes all others."""
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-pthread")
_KEY_DIGITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecipe:
    """Build recipe of one library: source files, compiler flags and level."""

    level: CpuTarget
    source: Path = SOURCE

    @property
    def flags(self) -> tuple[str, ...]:
        """All compiler arguments except the files."""
        return (*FLAGS, *self.level.flags)

    @property
    def name(self) -> str:
        """File name of the library. Reads the sources."""
        parts = [self.level.machine, self.level.name, *self.flags]
        for path in sorted(self.source.iterdir()):
            if path.suffix in (".cpp", ".h"):
                parts += [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_DIGITS]
        return f"inkstream-{self.level.name}-{key}.so"


PACKAGED = Path(__file__).parents[1] / "built"
"""Libraries that are part of the installation or the container image."""
MAX_OLD_LIBRARIES = 4
"""Libraries of other versions that remove_old_libraries() keeps."""


def find_library(name: str, directories: Sequence[Path]) -> Path | None:
    """The first library of this name that is complete and not writable by other users."""
    paths = (directory / name for directory in directories)
    return next((path for path in paths if is_valid_library(path)), None)


def is_valid_library(library: Path) -> bool:
    """Whether the library exists, is complete, and is owned by this user or root and not writable by others."""
    return (
        is_trusted_directory(library.parent)
        and (metadata := read_metadata(library)) is not None
        and _digest(library) == metadata["sha256"]
    )


def store_library(built: Path, library: Path, details: Mapping[str, Any]) -> None:
    """Moves `built` to `library` on the same file system; concurrent readers see no library or a complete one."""
    content = built.read_bytes()
    metadata = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), **details}
    publish(built, library, metadata, mode=0o644)


def remove_old_libraries(directory: Path, required: Collection[str]) -> None:
    """Removes all but the newest libraries of other versions; keeps those in `required`."""
    others = [path for path in directory.glob("inkstream-*.so") if path.name not in required]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[MAX_OLD_LIBRARIES:]:
        path.unlink(missing_ok=True)
        metadata_path(path).unlink(missing_ok=True)


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(read_trusted(path)).hexdigest()
    except OSError:
        return None
