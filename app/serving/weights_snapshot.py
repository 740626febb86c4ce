"""Snapshot of a weights directory, which stays readable when the directory changes, and change detection.

open() -- opens every file: renamed, unlinked or relinked files stay readable
keep() -- replaces what may be overwritten in place by private copies: small files in memory, large ones in the store

A large file that the store knows by its identity is neither copied nor read: the snapshot opens the copy that is there.
Other processes read the files through /proc/PID/fd, so nothing that happens to the store changes them either.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from app.common.weights_store import WeightsStore
from app.serving.gguf_tokenizers import GgufTokenizers
from app.serving.stored_copies import StoredCopies, in_memory, reflinked
from model.checkpoint.gguf_directory import MadeFiles, find_gguf, is_model_file, made_files, opened_weights
from model.checkpoint.manifest import check_manifest
from model.checkpoint.tensor_index import check_layout
from model.files import CheckpointError, regular_file
from model.weights_version import Directory, WeightsVersion

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
    """The current fingerprint of a directory, or of a GGUF file. Ignores hidden files, which may be uploads."""
    path = os.path.realpath(weights)
    files = []
    try:
        for entry in find_gguf(weights) if weights.is_file() else Path(path).iterdir():
            if not entry.name.startswith(".") and entry.name not in _IGNORED:
                status = entry.stat()
                files.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    except (OSError, CheckpointError):
        return WeightsFingerprint(path, ())
    return WeightsFingerprint(path, tuple(sorted(files)))


def what_is_missing(weights: Path) -> str:
    """Why the directory is not a complete set of weights yet; empty if it seems complete."""
    try:
        with opened_weights(weights, with_tokenizer=False) as directory:
            check_layout(directory, with_tokenizer=directory == weights)
            check_manifest(directory)
    except ValueError as error:
        return str(error)
    return ""


def without_links(weights: Path) -> Path:
    """The real path if there is a symlink in `weights`, which may be switched later; otherwise `weights` itself.

    A link to a blob of the Hugging Face cache, which has no name of its own, is kept.
    """
    real = Path(os.path.realpath(weights))  # resolve() raises for links in a circle
    if is_model_file(weights.name) and weights.is_symlink() and not is_model_file(real.name):
        return without_links(weights.parent) / weights.name
    return weights if real == Path(os.path.abspath(weights)) else real  # noqa: PTH100 (resolve() follows links)


_log = logging.getLogger("inkstream")
_SUFFIXES = (".json", ".jinja", ".safetensors", ".gguf")
_SMALL_BYTES = 1 << 20
"""A manifest may name files that are not weights: only small ones are kept."""
_MAX_FILES = 256
_MAX_IN_MEMORY_BYTES = 24 << 20
"""Limit of the copies in memory; larger files are copied to the store."""
_REPLACE = "replace files of the weights by renaming new ones over them (rsync, mv), never in place (cp)"


class WeightsSnapshot:
    """The opened files of one weights directory. The owner closes it once no process may start from it."""

    def __init__(self, directory: Path, descriptors: dict[str, int], files: Mapping[str, str]) -> None:
        """files: name -> where it is read; empty if the files could not be opened."""
        self.version = WeightsVersion(directory=str(directory), files=dict(files))
        self._descriptors = descriptors
        self._made: MadeFiles | None = None
        self._stored: StoredCopies | None = None

    @classmethod
    def open(cls, directory: Path, tokenizers: GgufTokenizers | None = None) -> WeightsSnapshot:
        """Opens the files that are in the directory now, and logs what cannot be kept.

        tokenizers: those of GGUF files that are kept. Raises CheckpointError for a GGUF file that cannot be read, since
        the directory is made from it.
        """
        if paths := find_gguf(directory):
            return cls._of_gguf(paths, tokenizers)
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

    @classmethod
    def _of_gguf(cls, paths: list[Path], tokenizers: GgufTokenizers | None) -> WeightsSnapshot:
        """The files themselves, and those made from them, which need no copies. Raises CheckpointError."""
        numbers = {path.name: _open(path) for path in paths} if sys.platform == "linux" else {}
        descriptors = {name: number for name, number in numbers.items() if number is not None}
        files = {path.name: str(path.absolute()) for path in paths}
        files |= {name: f"/proc/{os.getpid()}/fd/{number}" for name, number in descriptors.items()}
        version = WeightsVersion(directory=str(paths[0].parent), files=files)
        try:
            opened = [version / path.name for path in paths]
            made = MadeFiles(made_files(opened, tokenizers and tokenizers.remember))
        except BaseException:
            for descriptor in descriptors.values():
                os.close(descriptor)
            raise
        snapshot = cls(paths[0].parent, descriptors, {**files, **made.paths})
        snapshot._made = made
        return snapshot

    @property
    def directory(self) -> Directory:
        """The weights as they were when the snapshot was taken; the directory itself if nothing could be opened."""
        return self.version if self.version.files else self.version.path

    def keep(self, store: WeightsStore | None) -> None:
        """Replaces each descriptor with a private copy. Never raises: logs files without a copy."""
        total, failed, large = 0, dict[str, str](), list[str]()
        for size, name in sorted((os.fstat(number).st_size, name) for name, number in self._descriptors.items()):
            total += size
            if total > _MAX_IN_MEMORY_BYTES:
                large.append(name)
                continue
            try:
                self._replace(name, in_memory(self._descriptors[name], name))
            except OSError as error:
                failed[name] = str(error.strerror)
        if large:
            failed |= self._keep_large(large, store)
        if failed:
            names = {reason: [name for name in failed if failed[name] == reason] for reason in failed.values()}
            what = ", ".join(f"{', '.join(names[reason])} ({reason})" for reason in names)
            _log.warning("%s: no private copy of %s: %s", self.version, what, _REPLACE)

    def close(self) -> None:
        """Closes all files; idempotent."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        if self._made:
            self._made.close()
        if self._stored:
            self._stored.close()
        self._descriptors, self._stored, self.version = {}, None, WeightsVersion(directory=self.version.directory)

    def _replace(self, name: str, copy: int) -> None:
        """Lets `name` be read from this descriptor, which is closed."""
        os.dup2(copy, self._descriptors[name], inheritable=False)
        os.close(copy)

    def _keep_large(self, names: list[str], store: WeightsStore | None) -> dict[str, str]:
        """Replaces the descriptors of these files; returns why some have no copy."""
        problem = "there is no cache directory: give one with --cache-dir"
        if store:
            self._stored = StoredCopies(store, self.version, self._descriptors, names)
            if not (problem := self._stored.find_or_make()):
                for name, copy in self._stored.copies.items():
                    self._replace(name, copy)
                self.version = self.version.with_hashes(self._stored.hashes)
                return {}
        failed = {}
        for name in names:
            try:
                self._replace(name, reflinked(self._descriptors[name], self.version.path))
            except OSError:
                failed[name] = problem
        return failed


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
