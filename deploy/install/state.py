"""What is installed: .venv/installed, and whether that is what is asked for."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.install.choices import Settings

ROOT = Path(__file__).resolve().parents[2]
GROUPS = ("runtime", "dev")
"""In order: the environment of a group has all that those before it need."""
UNFINISHED = "unfinished"
"""A file in the environment while it changes."""
_KEYS = {
    "root",
    "group",
    "inputs",
    "torch_asked",
    "torch_build",
    "torch",
    "python",
    "python_asked",
    "kernels",
    "library",
}


def read_stamp(venv: Path) -> dict[str, Any]:
    """What is installed; nothing where that is unknown: no environment, or one that an older version made."""
    with contextlib.suppress(OSError, ValueError):
        stamp = json.loads((venv / "installed").read_bytes())
        if isinstance(stamp, dict) and stamp.keys() >= _KEYS and stamp["group"] in GROUPS:
            return stamp
    return {}


def write_stamp(venv: Path, stamp: Mapping[str, Any]) -> None:
    """Replaces the file at once, so that no reader sees a part of it."""
    new = venv / "installed.new"
    new.write_text(json.dumps(stamp, indent=1) + "\n")
    new.replace(venv / "installed")


def inputs_digest() -> str:
    """Of the files that say what belongs into the environment. The locks only repeat constraints.txt with hashes."""
    digest = hashlib.sha256()
    for name in ("constraints.txt", "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def is_complete(settings: Settings, stamp: Mapping[str, Any]) -> bool:
    """Whether the environment is what the settings ask for."""
    return (
        bool(stamp)
        and stamp["root"] == str(ROOT)
        and stamp["inputs"] == inputs_digest()
        and GROUPS.index(settings.group) <= GROUPS.index(stamp["group"])
        and settings.torch in ("", stamp["torch_asked"])
        and settings.python in ("", stamp["python_asked"])
        and not (settings.venv / UNFINISHED).exists()
    )


def kernels_key() -> str:
    """Changes with all that decides whether the kernels of before are still those that a start uses."""
    places = (os.environ.get(name, "") for name in ("INKSTREAM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"))
    parts = [os.uname().nodename, *places]
    for folder in ("source", "toolchain"):
        for path in sorted((ROOT / "app/engine/cpu" / folder).glob("*.*")):
            parts += [path.name, str(path.stat().st_size), str(path.stat().st_mtime_ns)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
