"""Files that a run can do without: when one cannot be written, that is told and the run goes on. Knows no contents."""

from __future__ import annotations

from pathlib import Path

from model.files import CheckpointError, write_file
from model.train.progress import tell


def write_extra(path: Path, content: str) -> None:
    """Replaces `path` at once, or warns."""
    try:
        write_file(path, content.encode())
    except CheckpointError as error:
        tell(f"warning: {error}; training goes on")
