"""Snapshot of a weights directory, which stays readable when the directory changes, and change detection.

open() -- opens every file: renamed, unlinked or relinked files stay readable
copy() -- makes a private copy of each opened file: files overwritten in place stay readable

Copies are unlinked files: they share storage with the original if the file system supports it (reflink), otherwise they
are in the cache or temporary directory if they fit, and they vanish with this process. Other processes read them
through /proc/PID/fd (model/files.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from app.common.fault_injection import fault
from app.common.operating_system import is_in_memory
from model.checkpoint.manifest import check_manifest
from model.checkpoint.tensor_index import check_layout
from model.files import CheckpointError, Files, reading_from, regular_file

# Names, inodes, sizes and times of its files, and its real path, so that switching a symlink counts as a change.

_IGNORED = ("README.md",)


@dataclass(frozen=True, slots=True)
class WeightsFingerprint:
    """State of a weights directory: equal fingerprints mean that no file was replaced in between."""

    path: str
    """The directory's real path."""
    files: tuple[tuple[str, int, int, int], ...]
    """Name, inode, bytes, modification time in ns; sorted by name. Empty if the directory is unreadable."""


def take_fingerprint(weights: Path) -> WeightsFingerprint:
    """The directory's current fingerprint. Ignores hidden files, which may be uploads in progress."""
    path = os.path.realpath(weights)
    files = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.name not in _IGNORED:
                    status = os.stat(entry.path)  # noqa: PTH116 (follows links, as the loader does)
                    files.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    except OSError:
        return WeightsFingerprint(path, ())
    return WeightsFingerprint(path, tuple(sorted(files)))


def what_is_missing(weights: Path) -> str:
    """Why the directory is not a complete set of weights yet; empty if it seems complete."""
    try:
        check_layout(weights)
        check_manifest(weights)
    except ValueError as error:
        return str(error)
    return ""


def without_links(weights: Path) -> Path:
    """The real path if there is a symlink in `weights`, which may be switched later; otherwise `weights` itself."""
    real = weights.resolve()
    return weights if real == Path(os.path.abspath(weights)) else real  # noqa: PTH100 (resolve() follows links)


_log = logging.getLogger("inkstream")
_SUFFIXES = (".json", ".jinja", ".safetensors")
_SMALL_BYTES = 1 << 20
"""A manifest may name files that are not weights: only small ones are kept."""
_MAX_FILES = 256
_MAX_COPIED_BYTES, _MAX_IN_MEMORY_BYTES = 1 << 30, 24 << 20
"""Limits of all copies together, on disk and in a memory file system."""
_SHARE_OF_FREE_SPACE = 0.5
_FICLONE = 0x40049409
_REPLACE = "replace files of the weights by renaming new ones over them (rsync, mv), never in place (cp)"


class WeightsSnapshot:
    """The opened files of one weights directory. The owner closes it once no process may start from it."""

    def __init__(self, directory: Path, descriptors: dict[str, int], files: Files) -> None:
        self.directory = directory
        self.files = files
        """The argument of reading_from(); empty if the files could not be opened: the directory itself is read."""
        self._descriptors = descriptors

    @classmethod
    def open(cls, directory: Path) -> WeightsSnapshot:
        """Opens the files that are in the directory now. Never raises: logs what cannot be kept."""
        if sys.platform != "linux":
            return cls(directory, {}, {})
        descriptors: dict[str, int] = {}
        try:
            names = [name for name in os.listdir(directory) if not name.startswith(".")]  # noqa: PTH208
            for name in names:
                if len(descriptors) > _MAX_FILES:
                    raise OSError(0, f"more than {_MAX_FILES} files")
                if (descriptor := _open(directory / name)) is not None:
                    descriptors[name] = descriptor
        except OSError as error:
            for descriptor in descriptors.values():
                os.close(descriptor)
            _log.warning("%s: the served weights cannot be kept open (%s)", directory, error.strerror)
            return cls(directory, {}, {})
        folder = f"/proc/{os.getpid()}/fd"
        files = {name: f"{folder}/{descriptors[name]}" if name in descriptors else "" for name in names}
        return cls(directory, descriptors, files if descriptors else {})

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Within this context the directory's files are read as the snapshot has them."""
        with reading_from(self.directory, self.files):
            yield

    def copy(self, folders: Sequence[Path]) -> None:
        """Replaces each descriptor with a private copy, smallest files first. Never raises: logs files without a copy.

        folders: for copies that take space, in order of preference.
        """
        total, failed = 0, dict[str, str]()
        for size, name in sorted((os.fstat(number).st_size, name) for name, number in self._descriptors.items()):
            try:
                total += size
                with _private_copy(self._descriptors[name], self.directory, folders, total=total) as copy:
                    os.dup2(copy.fileno(), self._descriptors[name], inheritable=False)
            except OSError as error:
                failed[name] = str(error.strerror)
        if failed:
            reason = ", ".join(f"{name} ({reason})" for name, reason in failed.items())
            _log.warning("%s: no private copy of %s: %s", self.directory, reason, _REPLACE)

    def close(self) -> None:
        """Closes all files; idempotent."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors, self.files = {}, {}


def _open(path: Path) -> int | None:
    """A descriptor for reading; None for files that the loader refuses or does not need. Raises OSError."""
    try:
        regular_file(path)
    except CheckpointError:
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (path.suffix in _SUFFIXES or status.st_size <= _SMALL_BYTES):
        return descriptor
    os.close(descriptor)
    return None


def _private_copy(descriptor: int, directory: Path, folders: Sequence[Path], *, total: int) -> BinaryIO:
    """An unlinked file with the same content. Raises OSError with the reason if there is none.

    total: bytes of this copy and all previous ones.
    """
    fault("weights.copy")
    with contextlib.suppress(OSError):
        return _reflink(descriptor, directory)
    problem = OSError(0, "no temporary directory")
    for folder in folders:
        try:
            limit = _MAX_IN_MEMORY_BYTES if is_in_memory(folder) else _MAX_COPIED_BYTES
            if total > limit:
                raise OSError(0, f"more than {limit >> 20} MiB for {folder}")
            return _copied(descriptor, folder)
        except OSError as error:
            problem = error
    raise problem


def _reflink(descriptor: int, directory: Path) -> BinaryIO:
    """A copy that shares the original's storage. Raises OSError."""
    copy = os.fdopen(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), "rb+")
    try:
        fcntl.ioctl(copy, _FICLONE, descriptor)
    except BaseException:
        copy.close()
        raise
    return copy


def _copied(descriptor: int, folder: Path) -> BinaryIO:
    """A full copy. Raises OSError, leaving nothing in the folder."""
    size = os.fstat(descriptor).st_size
    if size > shutil.disk_usage(folder).free * _SHARE_OF_FREE_SPACE:
        raise OSError(0, f"{folder} has too little space")
    copy = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (the caller closes it)
    try:
        offset = 0
        while sent := os.sendfile(copy.fileno(), descriptor, offset, max(1, size - offset)):
            offset += sent
    except BaseException:
        copy.close()
        raise
    return copy
