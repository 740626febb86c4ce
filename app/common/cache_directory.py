"""The cache directory: where it is, who may write it, and how files get into it whole.

A file of the cache may have its metadata next to it, in FILE.json. A process that reads the cache trusts neither files
nor folders that other users can write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_log = logging.getLogger("inkstream")
CACHE_VARIABLE = "INKSTREAM_CACHE_DIR"
_POLL_SECONDS = 0.02


class CacheError(ValueError):
    """Nothing can be stored in the cache; the message says why."""


def cache_directory(requested: Path | None, environment: Mapping[str, str] | None = None) -> Path | None:
    """The requested directory, else the environment's, else the user's; None if there is no home directory."""
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


def read_metadata(file: Path) -> dict[str, Any] | None:
    """Metadata of a stored file; None if they are missing, invalid or writable by other users."""
    try:
        metadata = json.loads(read_trusted(metadata_path(file)))
    except (OSError, ValueError):
        return None
    return metadata if isinstance(metadata, dict) and isinstance(metadata.get("sha256"), str) else None


def metadata_path(file: Path) -> Path:
    """Path of the metadata of a stored file."""
    return file.with_name(f"{file.name}.json")


def publish(built: Path, target: Path, metadata: Mapping[str, Any], *, mode: int) -> None:
    """Moves `built` to `target`, with metadata next to it, once both are on disk. Raises OSError."""
    described = built.with_suffix(".json")
    described.write_text(json.dumps(metadata))
    for path in (built, described):
        path.chmod(mode)
        synchronize(path)
    # Write the metadata last: readers ignore a file without it.
    built.replace(target)
    described.replace(metadata_path(target))
    synchronize(target.parent)


@contextlib.contextmanager
def build_directory(
    directory: Path, content: str = "native kernels", *, wait_seconds: float | None = None
) -> Iterator[Path]:
    """A temporary folder inside `directory` for one build; concurrent builds wait. Raises CacheError.

    content: what is stored, for the error. wait_seconds: at most; None waits as long as the other build takes.
    """
    try:
        if not directory.parent.exists():  # mkdir() gives parents the mode of the umask
            directory.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        directory.mkdir(mode=0o755, exist_ok=True)
        if not is_trusted_directory(directory):
            raise CacheError(
                f"{directory} belongs to another user or is writable by others: run chmod go-w on it, or "
                "give another directory with --cache-dir"
            )
        with _locked(directory / ".lock", wait_seconds):
            for killed in directory.glob(".building-*"):
                shutil.rmtree(killed, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".building-", dir=directory, ignore_cleanup_errors=True) as folder:
                yield Path(folder)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CacheError(
            f"{content} cannot be stored in {directory} ({reason}): give another directory with --cache-dir"
        ) from None


def read_trusted(path: Path) -> bytes:
    """Content of a regular file, not a link, that only this user or root can write. Raises OSError."""
    with os.fdopen(open_trusted(path), "rb") as file:
        return file.read()


def open_trusted(path: Path) -> int:
    """A descriptor of a regular file, not a link, that only this user or root can write. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and is_trusted_owner(status):
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, "writable by other users", str(path))


def is_trusted_directory(directory: Path) -> bool:
    """Whether the directory exists and only this user or root can write it."""
    try:
        return is_trusted_owner(directory.stat())
    except OSError:
        return False


def is_trusted_owner(status: os.stat_result) -> bool:
    """Whether only this user or root can write the file."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def synchronize(path: Path) -> None:
    """Waits until the content of a file, or the names in a directory, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path, wait_seconds: float | None) -> Iterator[None]:
    """Waits for the lock, and logs that it waits: the holder may be suspended.

    Raises OSError, also if the file system has no locks, or if the time is over.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process of inkstream that writes to %s", path.parent)
            if wait_seconds is None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            else:
                _lock_before(descriptor, time.monotonic() + wait_seconds)
        yield
    finally:
        os.close(descriptor)


def _lock_before(descriptor: int, deadline: float) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OSError(0, "another process of inkstream holds the lock") from None
            time.sleep(_POLL_SECONDS)
