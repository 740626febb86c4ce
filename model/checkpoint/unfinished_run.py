"""Note in a weights directory that its training run is unfinished, with the command that resumes it."""

from __future__ import annotations

import shlex
from pathlib import Path

from model.files import CheckpointError, read_json

RESUME_FILE = "resume.json"
"""In the folder of the run's state."""
STATE_FOLDER = ".training"


def unfinished_run(directory: Path) -> str | None:
    """Command that resumes the unfinished run of a directory; None if there is none.

    The command is relative to the folder where the run was started, so it enters that first if it is another one.
    """
    try:
        note = read_json(directory / STATE_FOLDER / RESUME_FILE, optional=True)
    except CheckpointError:  # damaged: of no use
        return None
    command, folder = note.get("command"), note.get("folder")
    if not isinstance(command, str) or not isinstance(folder, str):
        return None
    return command if Path(folder) == Path.cwd() else f"cd {shlex.quote(folder)} && {command}"
