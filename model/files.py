"""File access for weights directories: bounded reads, atomic writes, reads through descriptors opened earlier.

A weights directory is untrusted input. Only regular files of the directory itself are read, JSON must be small and
without duplicate keys, and every error is reported in one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# A service has to restart its processes from the weights that it serves, even while the files are being replaced. It
# keeps these files open (app/serving/weights_snapshot.py) and tells each process where: name -> /proc/PID/fd/N. Inside
# reading_from(), model/files.py opens those, so every error message still names the file in the user's directory.

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


MOST_JSON_BYTES = 4 << 20
"""Parsed, a byte of JSON may take 35 bytes of memory; a layer of a model takes about 1,000 bytes of header."""
_MOST_LEVELS = 32
_MOST_CHARACTERS = 1000


class CheckpointError(ValueError):
    """A weights directory that cannot be loaded or written; one line that names the file and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """`text` without characters that break a line or steer a terminal, cut where it is very long."""
    shown = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def is_there(path: Path) -> bool:
    """Whether the directory has an entry of this name, be it a link to nothing."""
    if (names := names_in(path.parent)) is not None:
        return path.name in names
    return path.is_symlink() or path.exists()


def regular_file(path: Path) -> Path:
    """Where to open `path`: itself, or its opened file in a snapshot (model/files.py). Raises CheckpointError.

    It must be a regular file of its own directory. Links must stay inside, except those of the Hugging Face cache:
    snapshots/REVISION/name -> ../../blobs/HASH.
    """
    try:
        if opened := opened_path(path):
            return opened
        real, home = path.resolve(strict=True), path.parent.resolve(strict=True)
        mode = real.stat().st_mode
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except RuntimeError:  # what pathlib says of a link to itself before Python 3.13
        raise CheckpointError(f"{path}: cannot be read (links in a circle)") from None
    in_cache = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not real.is_relative_to(home) and not in_cache:
        raise CheckpointError(f"{path}: leads out of the directory; put the file itself there")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is not a regular file")
    return path


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file that is no longer than that. Raises CheckpointError."""
    try:
        with regular_file(path).open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > most_bytes:
        raise CheckpointError(f"{path}: has more than {most_bytes} bytes")
    refuse_pointer(path, content)
    return content


def refuse_pointer(path: Path, start: bytes) -> None:
    """Raises CheckpointError where a file begins as the note that git-lfs leaves in a file's place."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path}: is only a pointer of git-lfs; get the file itself with git lfs pull")


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a regular file; empty for an optional file that is not there. Raises CheckpointError."""
    if optional and not is_there(path):
        return {}
    content = read_bytes(path, MOST_JSON_BYTES)
    try:
        return parse_object(content)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def parse_object(content: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8 that has no key twice and no NaN. Raises ValueError, with the reason alone."""
    try:
        value = json.loads(content.decode(), object_pairs_hook=_object, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("must hold a JSON object")
    if _is_deep(value):
        raise ValueError(f"nested deeper than {_MOST_LEVELS} levels")
    return value


def sha256(path: Path) -> str:
    """Of the content, hexadecimal. Raises CheckpointError."""
    try:
        with (opened_path(path) or path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Replaces files that belong together: none before the disk has all of them. Raises CheckpointError.

    Where one cannot be replaced, those that were come back: what stood there before stands there again.
    """
    staged = {directory / f".{name}.{os.getpid()}.tmp": directory / name for name in files}
    kept = {path: temporary.with_suffix(".old") for temporary, path in staged.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for temporary, path in staged.items():
            with temporary.open("wb") as file:
                file.write(files[path.name])
                file.flush()
                os.fsync(file.fileno())
        for path in staged.values():
            _keep(path, kept[path])
        _replace(staged, kept)
        sync_directory(directory)
    except OSError as error:
        raise CheckpointError(f"{directory}: {', '.join(files)} cannot be written ({error.strerror})") from None
    finally:
        for leftover in (*staged, *kept.values()):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Replaces `path` at once or not at all, and only after the disk has the new content. Raises CheckpointError."""
    write_files(path.parent, {path.name: content})


def sync_directory(path: Path) -> None:
    """Makes renames within `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _keep(path: Path, second_name: Path) -> None:
    """Costs no space. Some file systems have no second names: what a rename replaces there is gone."""
    with contextlib.suppress(OSError):
        second_name.unlink(missing_ok=True)
        os.link(path, second_name)


def _replace(staged: Mapping[Path, Path], kept: Mapping[Path, Path]) -> None:
    """All or, where a rename fails, none."""
    replaced: list[Path] = []
    try:
        for temporary, path in staged.items():
            temporary.replace(path)
            replaced.append(path)
    except OSError:
        for path in replaced:
            if kept[path].exists():
                kept[path].replace(path)
            else:
                path.unlink()
        raise


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def _is_deep(value: Any) -> bool:
    """Whether repr() of it could fail, which error messages call."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        inner = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in inner if isinstance(child, dict | list)]
    return bool(level)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
