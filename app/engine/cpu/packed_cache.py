"""Cache of packed weights on disk: a later start reads them instead of hashing, checking and packing the weights.

An entry is a file weights-KEY.bin, the packed numbers of one decoder, next to weights-KEY.bin.json: the SHA-256 over
the SHA-256s of its pieces, and the weights files it was packed from. KEY covers all that decides the packed bytes: the
content of the weights files, the configuration, number format and quantization, the kernels' library (whose name has
the level of CPU and a hash of its sources), and the Python sources that read and pack.

Entries are read into memory rather than mapped: the pages of a file are not huge pages, which the kernels need.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from app.common.cache_directory import (
    CacheError,
    build_directory,
    cache_directory,
    is_trusted_directory,
    is_trusted_owner,
    metadata_path,
    publish,
    read_metadata,
)
from app.common.operating_system import is_in_memory
from app.engine.cpu.library import HugepageAllocator
from model.files import one_line, sha256, snapshot_path

T = TypeVar("T")
_log = logging.getLogger("inkstream")
FOLDER = "packed"
"""Within the cache directory."""
MIN_BYTES = 32 << 20
"""Smaller decoders are not kept: packing 256 MiB took 0.84 CPU seconds, so that these take about 0.1 (2026-11-27)."""
_PIECE = 2 << 20
_KEY_DIGITS = 24
_SETTLED_NS = 2_000_000_000
"""Age of a weights file from which its times tell whether it changes: no file system's clock is coarser."""
_SHARE_OF_FREE_SPACE = 0.5
_MAX_KNOWN_FILES = 1024
_ROOT = Path(__file__).parents[3]
_SOURCES = ("app/engine/cpu/*.py", "model/*.py", "model/checkpoint/*.py", "model/families/*.py", "model/nn/*.py")


class FileIdentity(NamedTuple):
    """State of a file: while it is equal, the content is unchanged. Times in ns."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int
    links: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Raises OSError."""
        status = path.stat()
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, *times, status.st_nlink)

    @property
    def is_reliable(self) -> bool:
        """Whether any later change of the file changes its times. Nothing changes a snapshot's copy, without links.

        Read-only images (EROFS, squashfs) and object stores have whole seconds, and no time of a change but that of
        the content, which a reproducible image may set to anything.
        """
        is_stamped = self.changed % 1_000_000_000 != 0
        return not self.links or (is_stamped and time.time_ns() - max(self.modified, self.changed) >= _SETTLED_NS)


class _Hashed(NamedTuple):
    digest: str
    opened: Path
    """The file that was read: that of the snapshot, if there is one."""
    identity: FileIdentity | None
    """None if the file may change without changing its identity."""


class PackedCache:
    """Packed weights in one directory, at most `limit` bytes. Never raises: what cannot be kept is logged."""

    def __init__(self, directory: Path, limit: int, *, least: int = MIN_BYTES) -> None:
        """least: smaller decoders are not kept."""
        self.directory, self._sizes = directory, range(least, limit + 1)
        self._hashed: dict[Path, _Hashed] = {}

    @classmethod
    def of(cls, cache_dir: str | None, limit: int) -> PackedCache | None:
        """The cache in --cache-dir; None if it is turned off or there is no directory for it."""
        directory = cache_directory(Path(cache_dir) if cache_dir else None)
        return cls(directory / FOLDER, limit) if directory and limit else None

    def sha256(self, path: Path) -> str:
        """See model.files.sha256; of a file that an entry was packed from, and that is unchanged, as remembered."""
        try:
            opened = snapshot_path(path) or path
            identity = FileIdentity.of(opened)
        except OSError:
            return sha256(path)  # which says what is wrong
        is_reliable = identity.is_reliable
        digest = (is_reliable and self._known_hashes.get(identity)) or sha256(path)
        self._hashed[path] = _Hashed(digest, opened, identity if is_reliable else None)
        return digest

    def entry(self, library: str, *facts: object) -> PackedEntry:
        """The entry of the weights that sha256() has read, for the kernels in the library of this name.

        facts: what else decides the packed bytes.
        """
        hashes = [self._hashed[path].digest for path in sorted(self._hashed)]
        parts = [*hashes, library, _sources_hash(), *map(repr, facts)]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_DIGITS]
        return PackedEntry(self.directory / f"weights-{key}.bin", self._sizes, self._hashed)

    @property
    def _known_hashes(self) -> Mapping[FileIdentity, str]:
        """SHA-256 of the weights files that entries were packed from."""
        if not is_trusted_directory(self.directory):
            return {}
        return {
            identity: digest
            for path in self.directory.glob("weights-*.bin")
            for identity, digest in _known_files(_read_metadata(path))
        }


class PackedEntry:
    """One entry, which may not exist."""

    def __init__(self, path: Path, sizes: range, hashed: Mapping[Path, _Hashed]) -> None:
        """sizes: bytes that are kept, the last one also of all entries together."""
        self.path, self._sizes, self._hashed = path, sizes, hashed

    def restore(self, threads: int) -> HugepageAllocator | None:
        """The packed weights in memory; None if there are none. Removes an entry that is damaged."""
        if not is_trusted_directory(self.path.parent) or (metadata := _read_metadata(self.path)) is None:
            return None
        try:
            memory = _read(self.path, metadata, threads)
        except (OSError, RuntimeError) as error:  # RuntimeError: no more threads are allowed
            _log.warning("%s: the packed weights cannot be read (%s), and are packed again", self.path, _reason(error))
            if isinstance(error, FileNotFoundError):
                _remove(self.path)  # its metadata, for which no other would be kept
            return None
        except ValueError as error:
            _log.warning("%s: %s; the weights are packed again", self.path, error)
            _remove(self.path)
            return None
        with contextlib.suppress(OSError):  # the cache may be read-only
            os.utime(self.path)
        known = dict(_known_files(metadata))
        if self._files.keys() - known.keys():  # the same weights elsewhere: the next start need not hash them
            files = [*(known | self._files).items()][-_MAX_KNOWN_FILES:]
            self._start(self._describe, {**metadata, "files": files})
        return memory

    def store_in_background(self, memory: HugepageAllocator) -> threading.Thread | None:
        """Writes the packed weights in a thread, which ends with the process; None if they are not to be kept."""
        if (size := memory.used_bytes) in self._sizes:
            return self._start(self._store, memory)
        if size >= self._sizes.stop:
            _log.info("packed weights are not kept: %d bytes are more than --packed-cache-bytes", size)
        return None

    @property
    def _files(self) -> dict[FileIdentity, str]:
        """SHA-256 of the weights files that a later start finds again: not of a snapshot's copies."""
        return {each.identity: each.digest for each in self._hashed.values() if each.identity and each.identity.links}

    def _start(self, write: Callable[[T, Path], None], what: T) -> threading.Thread | None:
        """Calls `write` in a thread, with a temporary folder and the lock of the cache. Logs what is wrong."""

        def run() -> None:
            with contextlib.suppress(OSError):  # the steps of the engine go first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            try:
                if any(each.identity is None for each in self._hashed.values()):
                    raise CacheError("the weights files are too new, or have no times that would show a change")
                with build_directory(self.path.parent, "packed weights") as folder:
                    write(what, folder)
            except CacheError as error:
                _log.warning("packed weights are not kept: %s", error)

        thread = threading.Thread(target=run, name="packed cache", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads are allowed
            _log.warning("packed weights are not kept: %s", error)
            return None
        return thread

    def _store(self, memory: HugepageAllocator, folder: Path) -> None:
        """Raises OSError."""
        if _read_metadata(self.path):  # another service was first
            return
        size, started = memory.used_bytes, time.monotonic()
        if is_in_memory(folder):
            raise OSError(0, "it is in memory")
        _make_space(self.path.parent, self._sizes.stop - 1 - size)
        if size > shutil.disk_usage(folder).free * _SHARE_OF_FREE_SPACE:
            raise OSError(0, f"{size >> 20} MiB are more than half of the free space")
        temporary = folder / self.path.name
        digests = []
        with temporary.open("xb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk refuses before anything is written
            for piece in _pieces(memory.buffers):
                digests.append(hashlib.sha256(piece).digest())
                file.write(piece)
        if any(FileIdentity.of(each.opened) != each.identity for each in self._hashed.values()):
            raise OSError(0, "the weights files changed while they were read")
        metadata = _sealed({"sha256": _root(digests), "bytes": size, "files": [*self._files.items()]})
        publish(temporary, self.path, metadata, mode=0o600)
        _log.info("packed weights kept: %s, %d MiB, %.1f s", self.path, size >> 20, time.monotonic() - started)

    def _describe(self, metadata: Mapping[str, Any], folder: Path) -> None:
        """Replaces the metadata of the entry. Raises OSError."""
        (temporary := folder / self.path.name).write_text(json.dumps(_sealed(metadata)))
        temporary.chmod(0o600)
        if self.path.exists():
            temporary.replace(metadata_path(self.path))


def describe(directory: Path) -> tuple[int, int]:
    """Number of entries in the cache directory, and their bytes."""
    sizes = [size for _, size, _ in _entries(directory / FOLDER)]
    return len(sizes), sum(sizes)


def _read(path: Path, metadata: Mapping[str, Any], threads: int) -> HugepageAllocator:
    """Reads and checks the packed weights on all threads. Raises OSError; ValueError if the entry is damaged."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not is_trusted_owner(status):
            raise OSError(0, "belongs to another user or is writable by others")
        if (size := status.st_size) != metadata.get("bytes") or not size:
            raise ValueError(f"has {size} bytes of packed weights instead of {metadata.get('bytes')}")
        memory = HugepageAllocator(size)
        whole = memoryview((ctypes.c_char * size).from_address(memory.start)).cast("B")

        def read(offset: int) -> bytes:
            piece = whole[offset : offset + _PIECE]
            done = 0
            while done < len(piece):
                n_read = os.preadv(descriptor, [piece[done:]], offset + done)
                if not n_read:
                    raise ValueError("was truncated while it was read")
                done += n_read
            return hashlib.sha256(piece).digest()

        with ThreadPoolExecutor(threads) as pool:
            digests = list(pool.map(read, range(0, size, _PIECE)))
    finally:
        os.close(descriptor)
    if _root(digests) != metadata["sha256"]:
        raise ValueError("the packed weights differ from their SHA-256")
    return memory


def _pieces(buffers: Iterable[tuple[int, int]]) -> Iterator[memoryview]:
    """The content of an entry in pieces of equal size: each buffer, padded to a cache line."""
    piece, used = bytearray(_PIECE), 0
    for address, n_bytes in buffers:
        buffer = memoryview((ctypes.c_char * n_bytes).from_address(address)).cast("B")
        done = 0
        while done < n_bytes:
            count = min(n_bytes - done, _PIECE - used)
            piece[used : used + count] = buffer[done : done + count]
            done, used = done + count, used + count
            if used == _PIECE:
                yield memoryview(piece)
                used = 0
    if used:
        yield memoryview(piece)[:used]


def _root(digests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _entries(directory: Path) -> list[tuple[float, int, Path]]:
    """Last use, bytes and path of each entry, the least recently used first."""
    found = []
    for path in directory.glob("weights-*.bin"):
        with contextlib.suppress(OSError):  # removed meanwhile
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    return sorted(found)


def _make_space(directory: Path, limit: int) -> None:
    """Removes entries that are incomplete, and the least recently used ones beyond `limit` bytes. Needs the lock."""
    entries = _entries(directory)
    total = sum(size for _, size, _ in entries)
    for _, size, path in entries:
        if total > limit or _read_metadata(path) is None:
            _remove(path)
            total -= size


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        metadata_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def _read_metadata(path: Path) -> Mapping[str, Any] | None:
    """Metadata of an entry; None without a complete one that only this user or root can write."""
    metadata = read_metadata(path)
    return metadata if metadata and _sealed(metadata) == metadata else None


def _sealed(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with their own SHA-256."""
    content = {name: value for name, value in metadata.items() if name != "metadata_sha256"}
    seal = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {**content, "metadata_sha256": seal}


def _known_files(metadata: Mapping[str, Any] | None) -> Iterator[tuple[FileIdentity, str]]:
    """Identity and SHA-256 of the weights files in an entry's metadata; none of another version's."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        for identity, digest in metadata["files"] if metadata else ():
            yield FileIdentity(*identity), digest


@cache
def _sources_hash() -> str:
    """Hash of the Python sources that read and pack weights."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in _ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    return one_line(os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error))
