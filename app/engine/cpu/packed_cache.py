"""Packed weights on disk: a later start reads them instead of checking and packing the weights.

An entry is a file packed-KEY.bin, the packed numbers of one decoder, in the folder of its weights version
(app/common/weights_store.py), next to packed-KEY.bin.json with the SHA-256 over the SHA-256s of its pieces. KEY covers
all that decides the packed bytes: the content of the weights files, the configuration, number format and quantization,
the kernels' library (whose name has the level of CPU and a hash of its sources), and the Python sources that read and
pack.

Entries are read into memory rather than mapped: the pages of a file are not huge pages, which the kernels need.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from app.common.cache_directory import CacheError, open_trusted, publish, read_metadata
from app.common.operating_system import is_in_memory
from app.common.weights_store import FileHashes, WeightsStore, hold, remove_with_metadata, seal
from app.engine.cpu.huge_pages import HugepageAllocator
from model.files import one_line

_log = logging.getLogger("inkstream")
MIN_BYTES = 32 << 20
"""Smaller decoders are not kept: packing 256 MiB took 0.84 CPU seconds, so that these take about 0.1 (2026-11-27)."""
_PIECE = 2 << 20
_KEY_DIGITS = 24
_SHARE_OF_FREE_SPACE = 0.5
_ROOT = Path(__file__).parents[3]
SOURCES = (
    *("app/engine/cpu/*.py", "model/*.py", "model/checkpoint/*.py", "model/families/*.py", "model/gguf/*.py"),
    "model/nn/*.py",
)
"""The Python code that reads and packs weights."""


class PackedEntry:
    """Packed weights of one version, which may not exist. Never raises: what cannot be kept is logged."""

    def __init__(
        self,
        store: WeightsStore,
        version: str,
        hashes: FileHashes,
        library: str,
        *facts: object,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        """hashes: of the files of this version. library: name of the kernels' library.

        facts: what else decides the packed bytes. min_bytes: smaller decoders are not kept.
        """
        self._store, self._version, self._hashes, self._min_bytes = store, version, hashes, min_bytes
        parts = [version, library, _sources_hash(), *map(repr, facts)]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_KEY_DIGITS]
        self.path = store.folder(version) / f"packed-{key}.bin"
        self._held: int | None = None

    def restore(self, threads: int) -> HugepageAllocator | None:
        """The packed weights in memory; None if there are none. Removes an entry that is damaged."""
        if not self._store.is_trusted(self._version) or (metadata := _read_metadata(self.path)) is None:
            return None
        try:
            if not self._hold():
                return None
            memory = _read(self._held, metadata, threads)
        except (OSError, RuntimeError) as error:  # RuntimeError: no more threads are allowed
            _log.warning("%s: the packed weights cannot be read (%s), and are packed again", self.path, _reason(error))
            if isinstance(error, FileNotFoundError):
                remove_with_metadata(self.path)  # its metadata, for which no other would be kept
            return None
        except ValueError as error:
            _log.warning("%s: %s; the weights are packed again", self.path, error)
            remove_with_metadata(self.path)
            return None
        with contextlib.suppress(OSError):  # the cache may be read-only
            os.utime(self.path)
        if self._hashes.has_news:  # the same weights elsewhere: the next start need not hash them
            self._in_background(None)
        return memory

    def store_in_background(self, memory: HugepageAllocator) -> threading.Thread | None:
        """Writes the packed weights in a thread, which ends with the process; None if they are not to be kept."""
        size = memory.used_bytes
        if self._min_bytes <= size <= self._store.limit:
            return self._in_background(memory)
        if size > self._store.limit > 0:
            _log.info("packed weights are not kept: %d bytes are more than --packed-cache-bytes", size)
        return None

    def release(self) -> None:
        """Lets the entry be removed: this process does not need it again."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _hold(self) -> bool:
        """Keeps the entry from being removed, which an engine that restarts reads again. Raises OSError."""
        self.release()
        self._held = open_trusted(self.path)
        return hold(self._held)

    def _in_background(self, memory: HugepageAllocator | None) -> threading.Thread | None:
        """Records what is known of the weights files, and stores the packed weights, if given; logs what is wrong."""

        def run() -> None:
            with contextlib.suppress(OSError):  # the steps of the engine go first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            try:
                with self._store.writing() as folder:
                    self._record(memory, folder)
            except CacheError as error:
                _log.warning("packed weights are not kept: %s", error)

        thread = threading.Thread(target=run, name="packed weights", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads are allowed
            _log.warning("packed weights are not kept: %s", error)
            return None
        return thread

    def _record(self, memory: HugepageAllocator | None, folder: Path) -> None:
        """Raises OSError."""
        self._hashes.settled()  # before anything is written
        started, written = time.monotonic(), None
        if memory and not _read_metadata(self.path):  # no other service was first
            written = self._write(memory, folder)
        if (descriptor := self._store.add(self._version, {}, self._hashes.settled())) is not None:
            os.close(descriptor)  # the API process holds the version, if it reads copies there
        if memory and written:
            publish(folder / self.path.name, self.path, written, mode=0o600)
            self._hold()
            took = time.monotonic() - started
            _log.info("packed weights kept: %s, %d MiB, %.1f s", self.path, memory.used_bytes >> 20, took)

    def _write(self, memory: HugepageAllocator, folder: Path) -> Mapping[str, Any]:
        """Writes the packed weights to the folder; returns their metadata. Raises OSError."""
        size = memory.used_bytes
        if is_in_memory(folder):
            raise OSError(0, "it is in memory")
        self._store.make_space(size)
        if size > shutil.disk_usage(folder).free * _SHARE_OF_FREE_SPACE:
            raise OSError(0, f"{size >> 20} MiB are more than half of the free space")
        digests = []
        with (folder / self.path.name).open("xb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk refuses before anything is written
            for piece in _pieces(memory.buffers):
                digests.append(hashlib.sha256(piece).digest())
                file.write(piece)
        return seal({"sha256": _root(digests), "bytes": size})


def _read(descriptor: int | None, metadata: Mapping[str, Any], threads: int) -> HugepageAllocator:
    """Reads and checks the packed weights on all threads. Raises OSError; ValueError if the entry is damaged."""
    assert descriptor is not None
    if (size := os.fstat(descriptor).st_size) != metadata.get("bytes") or not size:
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


def _read_metadata(path: Path) -> Mapping[str, Any] | None:
    """Metadata of an entry; None without a complete one that only this user or root can write."""
    metadata = read_metadata(path)
    return metadata if metadata and seal(metadata) == metadata else None


@cache
def _sources_hash() -> str:
    """Hash of the Python sources that read and pack weights."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in _ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    return one_line(os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error))
