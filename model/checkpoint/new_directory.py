"""A new directory that appears complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.files import CheckpointError, sync_directory


def check_new(out: Path, source: Path) -> None:
    """Checks that `out` may be created: it does not exist or is empty, and is not inside `source`.

    Raises CheckpointError.
    """
    real = Path(os.path.realpath(out))
    if real.is_relative_to(os.path.realpath(source)) and source.is_dir():
        raise CheckpointError(f"{out}: is inside {source}, which is read; name a directory elsewhere")
    try:
        if real.is_dir() and any(real.iterdir()):
            raise CheckpointError(f"{out}: exists and is not empty; name a new directory, or empty this one first")
    except OSError as error:
        raise _not_writable(out, error) from None
    if os.path.lexists(real) and not real.is_dir():
        raise CheckpointError(f"{out}: exists and is not a directory; name a new directory")


def check_space(out: Path, n_bytes: int) -> None:
    """Checks that the disk of `out`, which need not exist, has room. Raises CheckpointError."""
    real = Path(os.path.realpath(out))
    existing = next(folder for folder in (real, *real.parents) if folder.exists())
    try:
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise _not_writable(out, error) from None
    if free < n_bytes:
        raise CheckpointError(
            f"{out}: needs {n_bytes:,} bytes, and its disk has {free:,} free; free some space or use another disk"
        )


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` after the block; an error, Ctrl+C included, leaves nothing behind.

    Of several processes that make one `out`, the first to end has it, and the others fail. The files of the folder must
    be on disk at the end of the block. Raises CheckpointError; OSErrors of the block, too, become one.
    """
    real = Path(os.path.realpath(out))
    partial = real.with_name(f".{real.name}.{os.getpid()}.tmp")
    made: list[Path] = []
    try:
        try:
            made = _make_parents(real)
            shutil.rmtree(partial, ignore_errors=True)  # of a killed process with this id
            partial.mkdir()
            yield partial
            sync_directory(partial)
        except OSError as error:
            raise _not_writable(out, error) from None
        _rename(partial, real, out)
        made = []
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):  # something else uses it by now
                folder.rmdir()


def _make_parents(real: Path) -> list[Path]:
    """Creates the folders above; returns the new ones, the innermost first. Raises OSError."""
    missing = [folder for folder in real.parents if not folder.exists()]
    made: list[Path] = []
    try:
        for folder in reversed(missing):
            folder.mkdir()
            made.insert(0, folder)
    except OSError:
        for folder in made:
            folder.rmdir()
        raise
    return made


def _rename(partial: Path, real: Path, out: Path) -> None:
    try:
        partial.rename(real)  # on POSIX also over an empty directory
        sync_directory(real.parent)
    except OSError as error:
        if real.is_dir() and any(real.iterdir()):
            raise CheckpointError(f"{out}: another process has just filled it; name a new directory") from None
        hint = " (a mount point: name a directory inside it)" if real.is_mount() else ""
        raise CheckpointError(f"{out}: cannot be created ({error.strerror}){hint}") from None


def _not_writable(out: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{out}: cannot be written ({error.strerror or error}); nothing was left behind")
