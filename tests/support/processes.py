"""States of processes."""

from __future__ import annotations

from pathlib import Path


def has_exited(pid: int) -> bool:
    """Whether the process has ended, also if its parent has not noticed."""
    return _state(pid) in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached the process."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
