"""Resolves repositories of a hub one after the other, and prints what each did to this process and to the disk.

python -m tests.support.fetch_repositories FOLDER NAME...: HF_HOME must be FOLDER/a/b/c/home.
"""

from __future__ import annotations

import json
import resource
import sys
import time
import traceback
from pathlib import Path

from model.checkpoint import hub_transfer
from model.checkpoint.hub import resolve_weights
from model.files import CheckpointError


def main(folder: Path, names: list[str]) -> None:
    """Prints one line of JSON per repository."""
    hub_transfer._PAUSES = (0.0,)
    hub_transfer._WINDOW = 2.0  # seconds, of 60: this waits for slow answers
    home = folder / "a/b/c/home"
    outside = _outside(folder, home)
    for name in names:
        memory, began, written = _peak(), time.monotonic(), _bytes(home)
        outcome, message = "accepted", ""
        try:
            resolve_weights(name, lambda _: None)
        except CheckpointError as error:
            outcome, message = "refused", str(error)
        except Exception:
            outcome, message = "traceback", traceback.format_exc()
        entry = {
            "name": name, "outcome": outcome, "message": message, "seconds": time.monotonic() - began,
            "mib": (_peak() - memory) / 1024, "bytes": _bytes(home) - written,
            "outside": sorted(_outside(folder, home) - outside),
        }  # fmt: skip
        print(json.dumps(entry), flush=True)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _outside(folder: Path, home: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if not path.is_relative_to(home)}


def _bytes(home: Path) -> int:
    return sum(path.lstat().st_size for path in home.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
