"""Store of weights: one folder for each version that was served, named by its weights version.

<cache directory>/weights-store/VERSION/
    version.json     SHA-256 of each weights file that this version was read from, by the file's identity
    SHA-256          copy of a file with this content, read-only
    packed-KEY.bin   packed weights (app/engine/cpu/packed_cache.py)
    .in-use          locked (shared) by the services that serve the version

A file whose identity is known is not read again to learn its SHA-256. Folders without version.json are incomplete.
Writers hold the lock of the store. Readers need none: everything appears by rename, and what they have opened stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from app.common.cache_directory import (
    build_directory,
    cache_directory,
    is_trusted_directory,
    metadata_path,
    open_trusted,
    read_trusted,
    synchronize,
)
from model.files import CheckpointError, regular_file, sha256
from model.weights_version import Directory, File, WeightsVersion

FOLDER = "weights-store"
"""Within the cache directory, where a folder of another name may be the user's."""
PACKED = "packed-*.bin"
_METADATA, _IN_USE = "version.json", ".in-use"
_FORMER_FOLDER = "packed"
"""Of releases up to 0.2, within the cache directory."""
_VERSION_DIGITS = 32
_VERSION = re.compile(rf"[0-9a-f]{{{_VERSION_DIGITS}}}")
_MAX_VERSIONS = 64
_MAX_KNOWN_FILES = 1024
_SETTLED_NS = 2_000_000_000
"""Age of a weights file from which its times tell whether it changes: no file system's clock is coarser."""


class FileIdentity(NamedTuple):
    """State of a file: while it is equal, the content is unchanged. Times in ns."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int
    links: int

    @classmethod
    def of(cls, file: Path | int) -> FileIdentity:
        """Of a path or a descriptor. Raises OSError."""
        status = os.stat(file)  # noqa: PTH116 (it may be a descriptor)
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, *times, status.st_nlink)

    @property
    def is_reliable(self) -> bool:
        """Whether any later change of the file changes its times. Nothing changes a file without links, a private copy.

        Read-only images (EROFS, squashfs) and object stores have whole seconds, and record no change but the content's,
        whose time a reproducible image may set to anything.
        """
        is_stamped = self.changed % 1_000_000_000 != 0
        return not self.links or (is_stamped and time.time_ns() - max(self.modified, self.changed) >= _SETTLED_NS)


class WeightsStore:
    """The store in one cache directory. It takes at most `limit` bytes, unless more is in use."""

    def __init__(self, directory: Path, limit: int) -> None:
        self.directory, self.limit = directory, limit

    @classmethod
    def of(cls, cache_dir: str | Path | None, limit: int) -> WeightsStore | None:
        """The store in --cache-dir; None if there is no directory for it."""
        directory = cache_directory(Path(cache_dir) if cache_dir else None)
        return cls(directory / FOLDER, limit) if directory else None

    def folder(self, version: str) -> Path:
        """Folder of a version, which may not exist."""
        return self.directory / version[:_VERSION_DIGITS]

    def is_trusted(self, version: str) -> bool:
        """Whether the version has a folder, which only this user or root can write or replace."""
        return is_trusted_directory(self.directory) and is_trusted_directory(self.folder(version))

    def writing(self, *, wait_seconds: float | None = None) -> contextlib.AbstractContextManager[Path]:
        """Holds the lock of the store; yields a folder for what shall be published. Raises CacheError."""
        return build_directory(self.directory, "weights", wait_seconds=wait_seconds)

    def known_hashes(self) -> Mapping[FileIdentity, str]:
        """SHA-256 of the files that versions were read from, and of the copies here."""
        if not is_trusted_directory(self.directory):
            return {}
        return {
            identity: digest for folder in self._folders() for identity, digest in (_read_version(folder) or {}).items()
        }

    def open_copy(self, version: str, digest: str) -> int | None:
        """A descriptor of the copy with this SHA-256, if the version has an unchanged one."""
        folder = self.folder(version)
        if not self.is_trusted(version):
            return None
        with contextlib.suppress(OSError):
            descriptor = open_trusted(folder / digest)
            known = _read_version(folder) or {}
            if known.get(FileIdentity.of(descriptor)) == digest or hash_of(descriptor) == digest:
                return descriptor
            os.close(descriptor)
        return None

    def use(self, version: str) -> int | None:
        """A descriptor that keeps the version from being removed until it is closed; None without such a version."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self.folder(version) / _IN_USE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            if hold(descriptor):
                with contextlib.suppress(OSError):  # the store may be read-only
                    os.utime(descriptor)
                return descriptor
            os.close(descriptor)
        return None

    def add(self, version: str, built: Mapping[str, Path], known: Mapping[FileIdentity, str]) -> int | None:
        """Publishes copies, and what is known of files; returns use(). Needs the lock; raises OSError.

        built: SHA-256 -> file in the folder of writing().
        """
        folder = self.folder(version)
        folder.mkdir(mode=0o700, exist_ok=True)
        os.close(os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        descriptor = self.use(version)
        known = {**(_read_version(folder) or {}), **known}
        for digest, path in built.items():
            path.chmod(0o400)
            synchronize(path)
            path.replace(folder / digest)
            known[FileIdentity.of(folder / digest)] = digest
        _write_version(folder, version, known)
        return descriptor

    def make_space(self, n_bytes: int) -> None:
        """Removes what was not used for longest, until `n_bytes` more are within the limit. Needs the lock.

        Also removes incomplete folders and what former releases stored. Never removes what a service uses.
        """
        _remove_former_folder(self.directory.parent / _FORMER_FOLDER)
        versions = sorted(map(_Entry.of_version, self._folders()))
        incomplete = {entry.path for entry in versions if _read_version(entry.path) is None}
        complete = [entry.path for entry in versions if entry.path not in incomplete]
        surplus = incomplete | set(complete[: max(0, len(complete) - _MAX_VERSIONS)])
        packed = [_Entry.of_packed(path) for folder in self._folders() for path in folder.glob(PACKED)]
        total = n_bytes + sum(entry.n_bytes for entry in (*versions, *packed))
        for entry in sorted([*versions, *packed], key=lambda entry: (entry.path not in surplus, entry)):
            if entry.path in surplus or total > self.limit:
                total -= entry.remove()

    def forget(self, version: str) -> None:
        """Makes the version incomplete, so that its files are read whole again."""
        with contextlib.suppress(OSError):
            (self.folder(version) / _METADATA).unlink()

    def _folders(self) -> list[Path]:
        with contextlib.suppress(OSError):  # nothing was stored yet
            return [path for path in self.directory.iterdir() if _VERSION.fullmatch(path.name)]
        return []


class _Entry(NamedTuple):
    """What make_space() removes at once: packed weights, or a version with all that it has."""

    used_at: float
    path: Path
    n_bytes: int
    """Of a version without its packed weights."""
    lock: Path

    @classmethod
    def of_version(cls, folder: Path) -> _Entry:
        files = [path for path in folder.iterdir() if not path.match(PACKED) and not path.name.startswith(".")]
        used = map(_modified, (folder / _IN_USE, *folder.glob(PACKED)))
        return cls(max(used), folder, sum(map(_size, files)), folder / _IN_USE)

    @classmethod
    def of_packed(cls, path: Path) -> _Entry:
        return cls(_modified(path), path, _size(path), path)

    def remove(self) -> int:
        """Removes it, unless a service uses it; returns how many bytes that freed."""
        with _alone(self.lock) as is_alone:
            if not (is_alone and self.path.exists()):  # packed weights may have been removed with their version
                return 0
            if not self.path.is_dir():
                remove_with_metadata(self.path)
                return self.n_bytes
            packed_bytes = sum(map(_size, self.path.glob(PACKED)))
            (self.path / _METADATA).unlink(missing_ok=True)  # first: what is left is incomplete
            shutil.rmtree(self.path, ignore_errors=True)
            return self.n_bytes + packed_bytes


class _Read(NamedTuple):
    digest: str
    identity: FileIdentity
    is_settled: bool
    """Whether any change since then shows in the identity."""


class FileHashes:
    """SHA-256 of the weights files that a process loads: handed over with the version, remembered here, or computed."""

    def __init__(self, directory: Directory, store: WeightsStore | None) -> None:
        self._given = directory.hashes if isinstance(directory, WeightsVersion) else {}
        self._store = store
        self._known = store.known_hashes() if store else {}
        self._remembered: dict[File, str] = {}
        self._read: dict[Path, _Read] = {}

    def digest(self, file: File) -> str:
        """See model.files.sha256."""
        opened = regular_file(file)
        try:
            identity = FileIdentity.of(opened)
        except OSError:
            return sha256(file)  # which says what is wrong
        if given := self._given.get(file.name):
            return given
        if known := self._known.get(identity):
            self._remembered[file] = known
        digest = known or sha256(file)
        self._read[opened] = _Read(digest, identity, is_settled=bool(known) or identity.is_reliable)
        return digest

    def verify(self, version: str) -> None:
        """Reads the files whose SHA-256 was remembered: to be called before their numbers are used.

        Raises CheckpointError if one differs, and forgets the version.
        """
        for file, digest in self._remembered.items():
            if sha256(file) != digest:
                if self._store:
                    self._store.forget(version)
                raise CheckpointError(
                    f"{file}: its content has changed and its times have not: check the disk; "
                    "the next start reads the file anew"
                )

    @property
    def has_news(self) -> bool:
        """Whether a file was read that the store did not know, and will find again."""
        return any(
            each.is_settled and each.identity.links and each.identity not in self._known for each in self._read.values()
        )

    def settled(self) -> Mapping[FileIdentity, str]:
        """What may be remembered of the files. Raises OSError if one may have changed since it was read."""
        if not all(each.is_settled for each in self._read.values()):
            raise OSError(0, "the weights files are too new, or have no times that would show a change")
        if any(FileIdentity.of(opened) != each.identity for opened, each in self._read.items()):
            raise OSError(0, "the weights files changed while they were read")
        return {each.identity: each.digest for each in self._read.values() if each.identity.links}


def hold(descriptor: int) -> bool:
    """Takes a shared lock of an opened file of the store; False if it is being removed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # without locks, nothing is removed either
        pass
    return os.fstat(descriptor).st_nlink > 0


def seal(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with their own SHA-256."""
    content = {name: value for name, value in metadata.items() if name != "metadata_sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {**content, "metadata_sha256": digest}


def remove_with_metadata(path: Path) -> None:
    """Removes a stored file; errors are ignored."""
    with contextlib.suppress(OSError):
        metadata_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def hash_of(descriptor: int) -> str:
    """SHA-256 of the whole file. Raises OSError."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[bool]:
    """Whether no service holds the lock; inside the block, none can take it."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        yield isinstance(error, FileNotFoundError)  # of an incomplete version
        return
    try:
        is_alone = False
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_alone = True
        yield is_alone
    finally:
        os.close(descriptor)


def _read_version(folder: Path) -> dict[FileIdentity, str] | None:
    """What a version knows of files; None if it is incomplete, damaged, or writable by others."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        metadata = json.loads(read_trusted(folder / _METADATA))
        if seal(metadata) == metadata and is_trusted_directory(folder):
            return {FileIdentity(*identity): digest for identity, digest in metadata["files"]}
    return None


def _write_version(folder: Path, version: str, known: Mapping[FileIdentity, str]) -> None:
    """Raises OSError."""
    temporary = folder / f".{_METADATA}"
    files = [*known.items()][-_MAX_KNOWN_FILES:]
    temporary.write_text(json.dumps(seal({"version": version, "files": files})))
    temporary.chmod(0o600)
    synchronize(temporary)
    temporary.replace(folder / _METADATA)
    synchronize(folder)


def _remove_former_folder(folder: Path) -> None:
    for path in folder.glob("weights-*.bin*"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / ".lock").unlink(missing_ok=True)
        folder.rmdir()


def _size(path: Path) -> int:
    return path.stat().st_size


def _modified(path: Path) -> float:
    """Time at which an entry was last used; 0 for an incomplete one."""
    return path.stat().st_mtime if path.exists() else 0.0
