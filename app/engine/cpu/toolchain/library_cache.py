"""Cache of built kernel libraries: cache key, lookup, storing, cleanup.

A library is a file NAME.so next to a metadata file NAME.so.json, which holds its SHA-256 and build recipe. A loaded
library has all privileges of this process, so the cache ignores files that are incomplete or writable by others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.engine.cpu.toolchain.cpu_target import BuildError, CpuTarget

_log = logging.getLogger("inkstream")

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
CACHE_VARIABLE = "INKSTREAM_CACHE_DIR"
MAX_OLD_LIBRARIES = 4
"""Libraries of other versions that remove_old_libraries() keeps."""


def cache_directory(requested: Path | None, environment: Mapping[str, str] | None = None) -> Path | None:
    """The requested directory, else that of the environment, else the user's; None if there is no home directory."""
    environment = os.environ if environment is None else environment
    if requested or (configured := environment.get(CACHE_VARIABLE)):
        return requested or Path(configured or "")
    # The XDG specification ignores relative paths.
    if Path(xdg_cache := environment.get("XDG_CACHE_HOME", "")).is_absolute():
        return Path(xdg_cache) / "inkstream"
    try:
        return Path.home() / ".cache" / "inkstream"
    except RuntimeError:
        return None


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


def read_metadata(library: Path) -> dict[str, Any] | None:
    """Metadata of a library; None if it is missing, invalid or writable by other users."""
    try:
        metadata = json.loads(_read_trusted(metadata_path(library)))
    except (OSError, ValueError):
        return None
    return metadata if isinstance(metadata, dict) and isinstance(metadata.get("sha256"), str) else None


def store_library(built: Path, library: Path, details: Mapping[str, Any]) -> None:
    """Moves `built` to `library` on the same file system; concurrent readers see no library or a complete one."""
    content = built.read_bytes()
    metadata = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), **details}
    publish(built, library, metadata, mode=0o644)


def publish(built: Path, target: Path, metadata: Mapping[str, Any], *, mode: int) -> None:
    """Moves `built` to `target`, with metadata next to it, once both are on disk. Raises OSError."""
    described = built.with_suffix(".json")
    described.write_text(json.dumps(metadata))
    for path in (built, described):
        path.chmod(mode)
        _sync(path)
    # Write the metadata last: readers ignore a file without it.
    built.replace(target)
    described.replace(metadata_path(target))
    _sync(target.parent)


@contextlib.contextmanager
def build_directory(directory: Path, content: str = "native kernels") -> Iterator[Path]:
    """A temporary folder inside `directory` for one build; concurrent builds wait. Raises BuildError.

    content: what is stored, for the error.
    """
    try:
        if not directory.parent.exists():  # mkdir() gives parents the mode of the umask
            directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.mkdir(mode=0o755, exist_ok=True)
        if not is_trusted_directory(directory):
            raise BuildError(
                f"{directory} belongs to another user or is writable by others: run chmod go-w on it, or "
                "give another directory with --cache-dir"
            )
        with _locked(directory / ".lock"):
            for killed in directory.glob(".building-*"):
                shutil.rmtree(killed, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".building-", dir=directory, ignore_cleanup_errors=True) as folder:
                yield Path(folder)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise BuildError(
            f"{content} cannot be stored in {directory} ({reason}): give another directory with --cache-dir"
        ) from None


def remove_old_libraries(directory: Path, required: Collection[str]) -> None:
    """Removes all but the newest libraries of other versions; keeps those in `required`."""
    others = [path for path in directory.glob("inkstream-*.so") if path.name not in required]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[MAX_OLD_LIBRARIES:]:
        path.unlink(missing_ok=True)
        metadata_path(path).unlink(missing_ok=True)


def metadata_path(library: Path) -> Path:
    """Path of the metadata of a stored file."""
    return library.with_name(f"{library.name}.json")


def _read_trusted(path: Path) -> bytes:
    """Content of a regular file, not a link, that only this user or root can write. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or not is_trusted_owner(status):
            raise PermissionError(errno.EPERM, "writable by other users", str(path))
        return file.read()


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(_read_trusted(path)).hexdigest()
    except OSError:
        return None


def is_trusted_directory(directory: Path) -> bool:
    """Whether the directory exists and only this user or root can write it."""
    try:
        return is_trusted_owner(directory.stat())
    except OSError:
        return False


def is_trusted_owner(status: os.stat_result) -> bool:
    """Whether only this user or root can write the file."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for the lock, and logs that it waits: the holder may be suspended.

    Raises OSError, also if the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process of inkstream that writes to %s", path.parent)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
