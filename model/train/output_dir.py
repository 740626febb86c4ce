"""The output directory of a run: checks that it is writable, has enough space, and is locked for this run.

Folders that were created for a run that never started are removed again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from model.checkpoint.model_summary import describe_bytes
from model.checkpoint.tensor_index import INDEX_FILE, WEIGHTS_FILE
from model.files import STATE_FOLDER

_LOCK = "lock"


@contextlib.contextmanager
def locked(out: Path, *, overwrite: bool) -> Iterator[None]:
    """Locks the directory against other runs within the block. Raises ValueError."""
    work = out / STATE_FOLDER
    try:
        if any((out / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)) and not work.is_dir() and not overwrite:
            raise ValueError(f"--out {out}: holds a model without a run; use another folder, or add --overwrite")
        missing = [folder for folder in (work, out, *out.parents) if not folder.exists()]
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)  # NFS locks no folders
    except OSError as error:
        raise _not_writable(out, error) from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        except BlockingIOError:
            raise ValueError(f"--out {out}: another run uses it; use another folder") from None
        if not _is_current(lock, work / _LOCK):
            raise ValueError(f"--out {out}: another run has just ended; try again")
        try:
            yield
        finally:
            (work / _LOCK).unlink(missing_ok=True)
    finally:
        os.close(lock)
        for folder in missing:
            with contextlib.suppress(OSError):  # not empty: the run has started
                folder.rmdir()


def _is_current(lock: int, path: Path) -> bool:
    """Whether the path still names the locked file: a run that just ended removes it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), path.stat())
    return False


def require_disk_space(out: Path, n_bytes: int) -> None:
    """Checks free disk space before hours of training. Raises ValueError.

    Counts existing snapshots as free: the run replaces them.
    """
    free = free_bytes(out) + sum(path.stat().st_size for path in (out / STATE_FOLDER).glob("step-*/*"))
    if free < n_bytes:
        raise ValueError(
            f"--out {out}: the run needs {describe_bytes(n_bytes)} for snapshots and result, its disk has "
            f"{describe_bytes(free)} free; free some space or use another disk"
        )


def free_bytes(out: Path) -> int:
    """Free space on the disk of `out`, which may not exist yet. Raises ValueError if it cannot be written."""
    try:
        return shutil.disk_usage(_existing_folder(out)).free
    except OSError as error:
        raise _not_writable(out, error) from None


def _existing_folder(out: Path) -> Path:
    """`out`, or the closest of its parents that exists. Raises OSError if `out` cannot be made or written."""
    for folder in (out, *out.absolute().parents):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(folder.stat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return folder
    raise AssertionError("the root folder exists")


def _not_writable(out: Path, error: OSError) -> ValueError:
    return ValueError(f"--out {out}: cannot be written ({error.strerror}); use a writable folder")
