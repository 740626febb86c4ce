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
def held(out: Path, *, overwrite: bool) -> Iterator[None]:
    """Locks the directory against other runs within the block. Raises ValueError."""
    work = out / ".training"
    if any((out / name).exists() for name in (WEIGHTS_FILE, INDEX_FILE)) and not work.is_dir() and not overwrite:
        raise ValueError(f"--out {out}: holds a model that no run left there; name another folder, or add --overwrite")
    missing = [folder for folder in (work, out, *out.parents) if not folder.exists()]
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / _LOCK).open("a+")
    except OSError as error:
        raise ValueError(f"--out {out}: cannot be written ({error.strerror}); name a folder that can be") from None
    with lock:
        _take(lock, out)
        try:
            _sign(lock, out)
            yield
        finally:
            (work / _LOCK).unlink(missing_ok=True)
            for folder in missing:
                with contextlib.suppress(OSError):  # not empty: the run has begun
                    folder.rmdir()


def require_room(out: Path, n_bytes: int) -> None:
    """Whether the disk has so much room, before hours of training and not after. Raises ValueError.

    Snapshots that stand there are part of it: the run takes their place.
    """
    free = free_bytes(out) + sum(path.stat().st_size for path in (out / ".training").glob("step-*/*"))
    if free < n_bytes:
        raise ValueError(
            f"--out {out}: the run needs {describe_bytes(n_bytes)} for snapshots and result, its disk has "
            f"{describe_bytes(free)} free; make room or name a folder elsewhere"
        )


def free_bytes(out: Path) -> int:
    """On the disk where `out` is or would be."""
    return shutil.disk_usage(next(folder for folder in (out, *out.absolute().parents) if folder.is_dir())).free


def _take(lock: IO[str], out: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        who = lock.read().strip() or "unknown"
        raise ValueError(f"--out {out}: another run is at work there (process {who}); name another folder") from None
    if not _is_current(lock):
        raise ValueError(f"--out {out}: another run has left this very moment; try again")


def _sign(lock: IO[str], out: Path) -> None:
    """Past the buffer, whose rest would be written once more, and fail once more, when the file is closed."""
    try:
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), b"%d\n" % os.getpid())
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot be written ({error.strerror}); make room or name a folder elsewhere"
        ) from None


def _is_current(lock: IO[str]) -> bool:
    """Whether the name still leads to the file: who left in between has removed it, and the next one makes its own."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock.fileno()), Path(lock.name).stat())
    return False
