"""The output directory of a run: checks that it is writable, has enough space, and is locked for this run.

Folders that were created for a run that never started are removed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from model.checkpoint.model_summary import describe_bytes
from model.checkpoint.tensor_index import INDEX_FILE, WEIGHTS_FILE

_LOCK = "lock"


@contextlib.contextmanager
def locked(out: Path, *, overwrite: bool) -> Iterator[None]:
    """Locks the directory against other runs within the block. Raises ValueError."""
    work = out / ".training"
    if any((out / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)) and not work.is_dir() and not overwrite:
        raise ValueError(f"--out {out}: holds a model without a run; use another folder, or add --overwrite")
    missing = [folder for folder in (work, out, *out.parents) if not folder.exists()]
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / _LOCK).open("a+")
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror}); use a writable folder") from None
    with lock:
        _acquire(lock, out)
        try:
            _write_pid(lock, out)
            yield
        finally:
            (work / _LOCK).unlink(missing_ok=True)
            for folder in missing:
                with contextlib.suppress(OSError):  # not empty: the run has started
                    folder.rmdir()


def require_disk_space(out: Path, n_bytes: int) -> None:
    """Checks free disk space before hours of training. Raises ValueError.

    Counts existing snapshots as free: the run replaces them.
    """
    free = free_bytes(out) + sum(path.stat().st_size for path in (out / ".training").glob("step-*/*"))
    if free < n_bytes:
        raise ValueError(
            f"--out {out}: the run needs {describe_bytes(n_bytes)} for snapshots and result, its disk has "
            f"{describe_bytes(free)} free; free some space or use another disk"
        )


def free_bytes(out: Path) -> int:
    """Free space on the disk of `out`, which may not exist yet."""
    return shutil.disk_usage(next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())).free


def _acquire(lock: IO[str], out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        raise ValueError(f"--out {out}: another run uses it (process {owner}); use another folder") from None
    if not _is_current(lock):
        raise ValueError(f"--out {out}: another run has just ended; try again")


def _write_pid(lock: IO[str], out: Path) -> None:
    """Writes the process id, unbuffered: a failed buffered write would be repeated, and fail again, on close."""
    try:
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), b"%d\n" % os.getpid())
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot be written ({error.strerror}); free some space or use another disk"
        ) from None


def _is_current(lock: IO[str]) -> bool:
    """Whether the path still refers to the locked file: a run that just ended removes it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), Path(lock.name).stat())
    return False
