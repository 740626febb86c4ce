"""Process states, descendants, memory and open files, read from /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from benchmarks.service_process import child_pids


def has_exited(pid: int) -> bool:
    """Whether the process has ended; true for a zombie too."""
    return _state(pid) in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached the process."""
    return _state(pid) == "T"


def children(pid: int) -> list[int]:
    """Child processes of all threads; empty if the process has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return child_pids(pid)
    return []


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def living(pids: list[int]) -> list[int]:
    """The processes that have not ended."""
    return [pid for pid in pids if not has_exited(pid)]


def memory(pid: int, name: str = "VmRSS") -> int:
    """Bytes of this field of the process's /proc status."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{name}:")[2].split()[0]) << 10


def open_files(pid: int) -> int:
    """Number of open descriptors."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
