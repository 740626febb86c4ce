"""File access for weights directories: bounded reads, atomic writes.

A weights directory is untrusted input. Only regular files of the directory itself are read, JSON must be small and
without duplicate keys, and every error is reported in one line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import msgspec

from model.weights_version import File, WeightsFile

Struct = TypeVar("Struct", bound=msgspec.Struct)
MAX_JSON_BYTES = 4 << 20
"""A byte of JSON may take 35 bytes of memory once parsed; a model layer takes about 1,000 bytes of header."""
_MAX_DEPTH = 32
_MAX_CHARACTERS = 1000
MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}"
"""Pattern of the name that a model's manifest may give it."""


class CheckpointError(ValueError):
    """A weights directory that cannot be loaded or written; one line that names the file and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """`text` with line breaks and control characters escaped, truncated if very long."""
    shown = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def entry_exists(path: File) -> bool:
    """Whether the directory has an entry of this name; a broken link counts."""
    if isinstance(path, WeightsFile):
        return path.opened is not None
    return path.is_symlink() or path.exists()


def regular_file(path: File) -> Path:
    """The path to open for `path`: itself, or where its version keeps the file. Raises CheckpointError.

    It must be a regular file inside its directory, or a blob of the Hugging Face cache: links must not lead elsewhere.
    """
    if isinstance(path, WeightsFile):
        return _opened(path)
    try:
        real, directory = path.resolve(strict=True), path.parent.resolve(strict=True)
        mode = real.stat().st_mode
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}{_broken_link(path)})") from None
    except RuntimeError:  # pathlib raises it for link cycles before Python 3.13
        raise CheckpointError(f"{path}: cannot be read (links in a circle)") from None
    if not real.is_relative_to(directory) and not is_cache_blob(real):
        raise CheckpointError(f"{path}: leads out of the directory; put the file itself there")
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: is not a regular file")
    return path


def _opened(file: WeightsFile) -> Path:
    if file.opened is None:
        raise CheckpointError(f"{file}: cannot be read (No such file or directory)")
    return file.opened


def is_cache_blob(real: Path) -> bool:
    """Whether a real path is a file of a Hugging Face cache, which names content by its hash.

    models--ORG--NAME/blobs/HASH, or blobs/HH/HASH, which all models of the cache share. A directory of unknown origin
    may therefore link there: it reaches only models, and no file whose content it does not already know.
    """
    is_hash = bool(re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", real.name))
    folder = real.parent
    of_model = folder.name == "blobs" and folder.parent.name.startswith("models--")
    is_shared = folder.name == real.name[:2] and folder.parent.name == "blobs"
    return is_hash and (of_model or is_shared)


def linked_caches(directory: Path) -> dict[str, int]:
    """Folder of a Hugging Face cache -> number of links into it from this directory, which is none of its snapshots."""
    found: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        if directory.resolve().parent.name == "snapshots":
            return {}
        for path in sorted(directory.iterdir()):
            if path.is_symlink() and is_cache_blob(real := path.resolve()):
                found[str(real.parents[1])] += 1
    return dict(found)


def _broken_link(path: Path) -> str:
    """For an error message: where a link leads that leads nowhere."""
    if not path.is_symlink() or path.exists():
        return ""
    return f": a link to {os.readlink(path)}; copy the directory with cp -rL where that exists"  # noqa: PTH115


def read_bytes(path: File, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes`. Raises CheckpointError."""
    try:
        with regular_file(path).open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > max_bytes:
        raise CheckpointError(f"{path}: has more than {max_bytes} bytes")
    reject_lfs_pointer(path, content)
    return content


def reject_lfs_pointer(path: File, start: bytes) -> None:
    """Raises CheckpointError if the file is a git-lfs pointer instead of the content. start: its first bytes."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path}: is only a pointer of git-lfs; get the file itself with git lfs pull")


def read_json(path: File, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a regular file; empty if an optional file does not exist. Raises CheckpointError."""
    if optional and not entry_exists(path):
        return {}
    content = read_bytes(path, MAX_JSON_BYTES)
    try:
        return parse_object(content)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_struct(path: File, kind: type[Struct], *, optional: bool = False) -> Struct:
    """The fields of a msgspec struct in a JSON file; others are ignored. Raises CheckpointError."""
    content = read_json(path, optional=optional)
    try:
        return msgspec.convert(content, kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # json reads lone surrogates
        raise CheckpointError(f"{path}: {error}") from None


def parse_object(content: bytes) -> dict[str, Any]:
    """Parses a UTF-8 JSON object without duplicate keys or NaN. Raises ValueError with only the reason."""
    try:
        value = json.loads(
            content.decode(), object_pairs_hook=_object_with_unique_keys, parse_constant=_reject_constant
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("must hold a JSON object")
    if _is_deep(value):
        raise ValueError(f"nested deeper than {_MAX_DEPTH} levels")
    return value


RESUME_FILE = "resume.json"
"""In the folder of a training run's state: the command that resumes the run, and where it was started."""
STATE_FOLDER = ".training"


def unfinished_run(directory: Path) -> str | None:
    """The command that resumes the unfinished training run of a weights directory; None without such a run.

    The command is relative to the folder where the run was started, so it enters that first if it is another one.
    """
    try:
        note = read_json(directory / STATE_FOLDER / RESUME_FILE, optional=True)
    except CheckpointError:  # a damaged note is of no use
        return None
    command, folder = note.get("command"), note.get("folder")
    if not isinstance(command, str) or not isinstance(folder, str):
        return None
    return command if Path(folder) == Path.cwd() else f"cd {shlex.quote(folder)} && {command}"


def sha256(path: File) -> str:
    """Hexadecimal SHA-256 of the content. Raises CheckpointError."""
    try:
        with (_opened(path) if isinstance(path, WeightsFile) else path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Replaces files that belong together, after all of them are on disk. Raises CheckpointError.

    If one cannot be replaced, restores those that were.
    """
    staged = {directory / f".{name}.{os.getpid()}.tmp": directory / name for name in files}
    backups = {path: temporary.with_suffix(".old") for temporary, path in staged.items()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for temporary, path in staged.items():
            with _new_file(temporary) as file:
                file.write(files[path.name])
        for path in staged.values():
            _back_up(path, backups[path])
        _replace(staged, backups)
        sync_directory(directory)
    except OSError as error:
        raise CheckpointError(f"{directory}: {', '.join(files)} cannot be written ({error.strerror})") from None
    finally:
        for leftover in (*staged, *backups.values()):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)


def write_file(path: Path, content: bytes) -> None:
    """Replaces `path` atomically once the new content is on disk. Raises CheckpointError."""
    write_files(path.parent, {path.name: content})


@contextmanager
def replaced_file(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that replaces `path` atomically after the block, once it is on disk. Raises OSError.

    mode: permissions from its creation on, less the umask.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _new_file(temporary, mode) as file:
            yield file
        move(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def move(source: Path, target: Path) -> None:
    """Renames a file or folder, whose content is on disk, within a file system; durable at once. Raises OSError."""
    source.rename(target)  # on POSIX also over a file that exists
    sync_directory(target.parent)


@contextmanager
def _new_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file, whose content is on disk after the block."""
    path.unlink(missing_ok=True)  # of a killed process with this id
    path.touch(mode, exist_ok=False)
    with path.open("r+b") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Makes renames within `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _back_up(path: Path, backup: Path) -> None:
    """Hard-links `path` to `backup`, which takes no space. Without hard links there is no backup."""
    with contextlib.suppress(OSError):
        backup.unlink(missing_ok=True)
        os.link(path, backup)


def _replace(staged: Mapping[Path, Path], backups: Mapping[Path, Path]) -> None:
    """Renames all files; if one rename fails, undoes the others."""
    replaced: list[Path] = []
    try:
        for temporary, path in staged.items():
            temporary.replace(path)
            replaced.append(path)
    except OSError:
        for path in replaced:
            if backups[path].exists():
                backups[path].replace(path)
            else:
                path.unlink()
        raise


def _object_with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"duplicate key {duplicate!r}")
    return parsed


def _is_deep(value: Any) -> bool:
    """Whether repr(), which error messages call, could exceed the recursion limit."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in inner if isinstance(child, dict | list)]
    return bool(level)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
