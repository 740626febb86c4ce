"""Cache of built kernel libraries: their cache key, lookup, storing, cleanup.

A library is a file NAME.so next to a metadata file NAME.so.json, which holds its SHA-256 and its build recipe. A loaded
library runs with all our privileges, so a library that is incomplete or that another user could write is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.engine.cpu.toolchain.cpu_target import BuildError, CpuTarget

# The name holds a key of everything that the library depends on, but not of the compiler: a machine that has none (the
# last stage of a container) must be able to tell whether a library is the right one.

ABI = 2
"""What ink_abi() of the library must answer; raised whenever an exported function changes."""
SOURCE = Path(__file__).parents[1] / "source"
UNIT = "inkstream.cpp"
"""The one file that is compiled; it includes those next to it."""
FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-pthread")
_KEY_DIGITS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRecipe:
    """One library: these files, compiled with these flags for this level."""

    level: CpuTarget
    source: Path = SOURCE

    @property
    def flags(self) -> tuple[str, ...]:
        """All compiler arguments except the files."""
        return (*FLAGS, *self.level.flags)

    @property
    def name(self) -> str:
        """Of the library's file. Reads the sources."""
        parts = [str(ABI), self.level.machine, self.level.name, self.level.cpu, *self.flags]
        for path in sorted(self.source.iterdir()):
            if path.suffix in (".cpp", ".h"):
                parts += [path.name, hashlib.sha256(path.read_bytes()).hexdigest()]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_DIGITS]
        return f"inkstream-{self.level.name}-{key}.so"


PACKAGED = Path(__file__).parents[1] / "built"
"""Libraries that came with the installation, or the container image."""
CACHE_VARIABLE = "INKSTREAM_CACHE_DIR"
KEPT = 4
"""Libraries of other versions that are kept when a new one is stored."""
_STALE_SECONDS = 3600.0


def cache_directory(asked: Path | None, environment: Mapping[str, str] | None = None) -> Path | None:
    """The one that was asked for, else of the environment, else of the user; None where the user has no home."""
    environment = os.environ if environment is None else environment
    if asked or (named := environment.get(CACHE_VARIABLE)):
        return asked or Path(named or "")
    if Path(shared := environment.get("XDG_CACHE_HOME", "")).is_absolute():  # its specification says: ignore others
        return Path(shared) / "inkstream"
    try:
        return Path.home() / ".cache" / "inkstream"
    except RuntimeError:
        return None


def find_library(name: str, directories: Sequence[Path]) -> Path | None:
    """The first library of this name that is complete and that no other user could have written."""
    paths = (directory / name for directory in directories)
    return next((path for path in paths if is_sound(path)), None)


def is_sound(library: Path) -> bool:
    """Whether the library exists, is complete, and was written by this user or by root."""
    return _is_ours(library.parent) and (note := read_note(library)) is not None and _digest(library) == note["sha256"]


def read_note(library: Path) -> dict[str, Any] | None:
    """Metadata of a library; None if it is missing or invalid, or another user could have written it."""
    try:
        note = json.loads(_read(_note_path(library)))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and isinstance(note.get("sha256"), str) else None


def put_library(built: Path, library: Path, facts: Mapping[str, Any]) -> None:
    """Moves `built`, on the same file system, to `library`; concurrent readers see no library or a complete one."""
    note = built.with_suffix(".json")
    content = built.read_bytes()
    note.write_text(json.dumps({"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), **facts}))
    for path in (built, note):
        path.chmod(0o644)
        _sync(path)
    # The metadata last: until it exists, the library is ignored.
    built.replace(library)
    note.replace(_note_path(library))
    _sync(library.parent)


@contextlib.contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """A temporary folder inside `directory` for one build; concurrent builds wait. Raises BuildError."""
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not _is_ours(directory):
            raise BuildError(
                f"{directory} belongs to another user, or can be written by others (chmod go-w helps): "
                "give another directory with --cache-dir"
            )
        with _lock(directory / ".lock") as is_alone:
            _sweep(directory, 0.0 if is_alone else _STALE_SECONDS)
            with tempfile.TemporaryDirectory(prefix=".building-", dir=directory, ignore_cleanup_errors=True) as folder:
                yield Path(folder)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise BuildError(
            f"native kernels cannot be kept in {directory} ({reason}): give another directory with --cache-dir"
        ) from None


def tidy(directory: Path, needed: Collection[str]) -> None:
    """Removes libraries of other versions but for the newest; those of the names in `needed` stay."""
    others = [path for path in directory.glob("inkstream-*.so") if path.name not in needed]
    for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT:]:
        path.unlink(missing_ok=True)
        _note_path(path).unlink(missing_ok=True)


def _note_path(library: Path) -> Path:
    return library.with_name(f"{library.name}.json")


def _read(path: Path) -> bytes:
    """A plain file that is ours, no link. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or not _is_trusted(status):
            raise PermissionError(errno.EPERM, "others could have written it", str(path))
        return file.read()


def _digest(path: Path) -> str | None:
    try:
        return hashlib.sha256(_read(path)).hexdigest()
    except OSError:
        return None


def _is_ours(directory: Path) -> bool:
    try:
        return _is_trusted(directory.stat())
    except OSError:
        return False


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Waits for the lock. False if the file system does not support locks, as some network file systems."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            is_alone = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            is_alone = False
        yield is_alone
    finally:
        os.close(descriptor)


def _sweep(directory: Path, least_age: float) -> None:
    """Removes what builds left that were killed."""
    for folder in directory.glob(".building-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime >= least_age:
                shutil.rmtree(folder)
