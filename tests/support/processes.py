"""Processes as /proc shows them: states, descendants, memory, open files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from benchmarks.service_process import child_pids


def has_exited(pid: int) -> bool:
    """Whether the process has ended, also if its parent has not noticed."""
    return _state(pid) in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached the process."""
    return _state(pid) == "T"


def children(pid: int) -> list[int]:
    """Child processes of all threads; none of a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return child_pids(pid)
    return []


def family(pid: int) -> list[int]:
    """The process and all its descendants."""
    return [pid, *(each for child in children(pid) for each in family(child))]


def living(pids: list[int]) -> list[int]:
    """Those that have not ended."""
    return [pid for pid in pids if not has_exited(pid)]


def memory(pid: int, name: str = "VmRSS") -> int:
    """Bytes that the process's status has under this name."""
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{name}:")[2].split()[0]) << 10


def open_files(pid: int) -> int:
    """How many descriptors are open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
