"""Reads the files of a directory through descriptors that were opened earlier, whatever their names lead to now.

A service has to restart its processes from the weights that it serves, even while the files are being replaced. It
keeps these files open (app/serving/weights_snapshot.py) and tells each process where: name -> /proc/PID/fd/N. Inside
reading_from(), model/files.py opens those, so every error message still names the file in the user's directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger("inkstream")
Files = Mapping[str, str]
"""Name -> path of the opened file; an empty path means that the file is read in the directory itself."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    directory: Path
    files: Files


_current: ContextVar[_Snapshot | None] = ContextVar("file_snapshot", default=None)


@contextmanager
def reading_from(directory: Path, files: Files) -> Iterator[None]:
    """Within this context (one thread or task), `directory` holds `files` and nothing else. No files: as it is."""
    if unreadable := next((path for path in files.values() if path and not os.access(path, os.R_OK)), None):
        _log.warning("%s cannot be read here: the files are read from %s itself", unreadable, directory)
        files = {}
    token = _current.set(_Snapshot(directory, files) if files else None)
    try:
        yield
    finally:
        _current.reset(token)


def files_of(directory: Path) -> Files:
    """What another process passes to reading_from() to read the same; empty where the directory is read as it is."""
    snapshot = _current.get()
    return snapshot.files if snapshot and snapshot.directory == directory else {}


def names_in(directory: Path) -> set[str] | None:
    """The names that the snapshot of this directory holds; None where it is read as it is."""
    snapshot = _current.get()
    return set(snapshot.files) if snapshot and snapshot.directory == directory else None


def opened_path(path: Path) -> Path | None:
    """Where the snapshot has this file open. None where the file is read at its own path.

    Raises FileNotFoundError where the directory did not have the file when the snapshot was taken.
    """
    snapshot = _current.get()
    if snapshot is None or snapshot.directory != path.parent:
        return None
    if path.name not in snapshot.files:
        raise FileNotFoundError(2, "No such file or directory", str(path))
    opened = snapshot.files[path.name]
    return Path(opened) if opened else None
