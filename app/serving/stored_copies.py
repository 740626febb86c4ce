"""Private copies of large weights files in the store: found there by the identity of the files, or made once.

unknown --identities known, copies there--> found
unknown --lock of the store, copy, SHA-256--> copied (the service starts) --on disk, renamed--> published

A copy shares storage with the original where the file system can (reflink). It is never a hard link: a file that is
overwritten in place changes under all of its names.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.common.cache_directory import CacheError
from app.common.fault_injection import fault
from app.common.operating_system import is_in_memory
from app.common.weights_store import FileIdentity, WeightsStore, hash_of
from model.checkpoint.tensor_index import version_of, weight_files
from model.files import one_line
from model.weights_version import WeightsVersion

_log = logging.getLogger("inkstream")
MAX_BYTES = 1 << 30
"""Limit of all copies of a version: the first start waits for them."""
_SHARE_OF_FREE_SPACE = 0.5
_LOCK_SECONDS = 10.0
"""How long a start waits for another service that stores weights, and that may be suspended."""
_FICLONE = 0x40049409


class StoredCopies:
    """Copies of some files of a weights directory. The owner closes it when they are no longer served."""

    def __init__(
        self, store: WeightsStore, version: WeightsVersion, descriptors: Mapping[str, int], names: Sequence[str]
    ) -> None:
        """descriptors: of the opened files of the version, which are to be copied if they are among `names`."""
        self.copies: dict[str, int] = {}
        """Name -> descriptor of its copy, which belongs to the caller of find_or_make()."""
        self.hashes: dict[str, str] = {}
        """SHA-256 of the copies that were made now; those that were found are not read again."""
        self._store, self._version, self._descriptors = store, version, descriptors
        self._names = names
        self._problem = ""
        self._is_ready = threading.Event()
        self._lock, self._is_closed = threading.Lock(), False
        self._in_use: int | None = None

    def find_or_make(self) -> str:
        """Sets `copies`, and publishes new ones in the background. Returns why there are none; empty if there are."""
        try:
            size = sum(os.fstat(self._descriptors[name]).st_size for name in self._names)
            if size > MAX_BYTES:
                return f"more than {MAX_BYTES >> 20} MiB"
            if self._find(self._known_sources(self._store.known_hashes())):
                return ""
            threading.Thread(target=self._make, args=(size,), name="weights store", daemon=True).start()
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no more threads are allowed
            return _reason(error)
        self._is_ready.wait()
        return self._problem

    def close(self) -> None:
        """Lets the store remove the version."""
        with self._lock:
            self._is_closed = True
            if self._in_use is not None:
                os.close(self._in_use)
                self._in_use = None

    def _known_sources(self, known: Mapping[FileIdentity, str]) -> dict[str, str]:
        """SHA-256 of the files, as far as it is known."""
        found = {name: known.get(FileIdentity.of(self._descriptors[name])) for name in self._names}
        return {name: digest for name, digest in found.items() if digest}

    def _find(self, hashes: Mapping[str, str]) -> bool:
        """Opens the copies of files with these hashes; False if one is missing."""
        if hashes.keys() != set(self._names):
            return False
        version = self._version_of(hashes)
        self._use(self._store.use(version))
        for name in self._names:
            if (copy := self._store.open_copy(version, hashes[name])) is None:
                self._drop_copies()
                return False
            self.copies[name] = copy
        return True

    def _drop_copies(self) -> None:
        while self.copies:
            os.close(self.copies.popitem()[1])
        self.hashes = {}

    def _version_of(self, hashes: Mapping[str, str]) -> str:
        """The weights version. Raises CheckpointError if the directory is incomplete."""
        names = [file.name for file in weight_files(self._version)]
        if missing := next((name for name in names if name not in self._descriptors), None):
            raise ValueError(f"{missing} cannot be opened")
        return version_of({Path(name): hashes.get(name) or hash_of(self._descriptors[name]) for name in names})

    def _use(self, descriptor: int | None) -> None:
        """Keeps the version that this lock belongs to in the store."""
        with self._lock:
            previous, self._in_use = self._in_use, descriptor
            if self._is_closed:
                previous, self._in_use = descriptor, None
        if previous is not None:
            os.close(previous)

    def _make(self, size: int) -> None:
        """Runs in a thread of its own, since copies need not be on disk for the service to start."""
        try:
            with self._store.writing(wait_seconds=_LOCK_SECONDS) as folder:
                self._make_in(folder, size)
        except (CacheError, OSError, ValueError) as error:
            if self._is_ready.is_set():
                _log.warning("the copies of the weights are not kept for the next start: %s", _reason(error))
            else:
                self._drop_copies()
                self._problem = _reason(error)
        finally:
            self._is_ready.set()

    def _make_in(self, folder: Path, size: int) -> None:
        """folder: a temporary one in the store, whose lock is held. Raises OSError, ValueError."""
        sources, known = self._sources(), self._store.known_hashes()
        if self._find(self._known_sources(known)):  # another service was first
            return
        if {source.size for source in sources.values()} <= {identity.size for identity in known}:
            hashes = {name: hash_of(self._descriptors[name]) for name in self._names}
            if self._find(hashes):  # the same weights elsewhere
                self._publish({}, sources, hashes)
                return
        self._check_space(folder, size)
        started, built = time.monotonic(), dict[str, Path]()
        for index, name in enumerate(self._names):
            self.copies[name] = copied(self._descriptors[name], path := folder / str(index))
            self.hashes[name] = hash_of(self.copies[name])
            built[self.hashes[name]] = path
        if self._sources() == sources:  # else the copies may be of no version at all, as the reload will tell
            self._store.make_space(size)
            self._publish(built, sources, dict(self.hashes))
            _log.info("weights kept: %d MiB, %.1f s", size >> 20, time.monotonic() - started)

    def _sources(self) -> dict[str, FileIdentity]:
        return {name: FileIdentity.of(self._descriptors[name]) for name in self._names}

    def _publish(
        self, built: Mapping[str, Path], sources: Mapping[str, FileIdentity], hashes: Mapping[str, str]
    ) -> None:
        """Publishes copies with what may be remembered of the files they were made from, while the service starts.

        sources: identities of the files before they were read.
        """
        now, version = self._sources(), self._version_of(hashes)
        known = {each: hashes[name] for name, each in sources.items() if each.is_reliable and each == now[name]}
        self._is_ready.set()  # from here on, `_descriptors` may be the copies
        with contextlib.suppress(OSError):  # the start of the engine goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        self._use(self._store.add(version, built, known))

    def _check_space(self, folder: Path, size: int) -> None:
        if is_in_memory(folder):
            raise OSError(0, f"{self._store.directory} is in memory")
        if size > shutil.disk_usage(folder).free * _SHARE_OF_FREE_SPACE:
            raise OSError(0, f"{self._store.directory} has too little space")


def copied(source: int, target: Path) -> int:
    """A descriptor of a new file with the same content. Raises OSError."""
    return _filled(os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), source)


def reflinked(source: int, folder: Path) -> int:
    """A descriptor of an unnamed file that shares the original's storage. Raises OSError."""
    copy = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.ioctl(copy, _FICLONE, source)
    except BaseException:
        os.close(copy)
        raise
    return copy


def in_memory(source: int, name: str) -> int:
    """A descriptor of a copy in memory that nothing can change. Raises OSError."""
    copy = _filled(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), source)
    fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return copy


def _filled(copy: int, source: int) -> int:
    """The descriptor `copy` of an empty file, with the content of `source`; closes it if that fails."""
    try:
        fault("weights.copy")
        try:
            fcntl.ioctl(copy, _FICLONE, source)
        except OSError:  # the file system has no reflinks, or it is another one
            offset = 0
            while sent := os.sendfile(copy, source, offset, 1 << 30):
                offset += sent
    except BaseException:
        os.close(copy)
        raise
    return copy


def _reason(error: Exception) -> str:
    return one_line(os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error))
