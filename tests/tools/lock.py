"""Writes lock files with hashes, after a change of constraints.txt: python -m tests.tools.lock (make lock).

requirements.lock has what the service needs, requirements-dev.lock what development needs besides. torch is in neither:
the user chooses its build at installation. uv reads the hashes of all wheels of a pin from the index, so a lock serves
every platform; it resolves nothing anew.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT

SERVING, DEVELOPMENT = ROOT / "requirements.lock", ROOT / "requirements-dev.lock"
_HEAD = {
    SERVING: "# What the service needs besides torch, with the hashes of every wheel. Made by `make lock`.\n",
    DEVELOPMENT: "# What development needs besides requirements.lock. Made by `make lock`.\n",
}


def pins() -> dict[str, str]:
    """Name -> version of everything in constraints.txt except torch."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in found.items() if name != "torch"}


def locked(path: Path) -> dict[str, str]:
    """Name -> version of a lock file. Raises ValueError if an entry has no hash."""
    entries = re.findall(r"^(\S+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", path.read_text(), re.M)
    if len(entries) != len(re.findall(r"^[^#\s]", path.read_text(), re.M)):
        raise ValueError(f"{path.name}: an entry is no pin with hashes")
    return {canonicalize_name(name): version for name, version, _ in entries}


def serving() -> set[str]:
    """Names of all direct and indirect dependencies of inkstream[guided,torch,traces] on this platform."""
    found: set[str] = set()
    todo = [("inkstream", frozenset({"guided", "torch", "traces"}))]
    while todo:
        name, extras = todo.pop()
        for requirement in map(Requirement, _requires(name)):
            wanted = [{"extra": extra} for extra in (*extras, "")]
            needed = requirement.marker is None or any(map(requirement.marker.evaluate, wanted))
            below = canonicalize_name(requirement.name)
            if needed and below not in found:
                found.add(below)
                todo.append((below, frozenset(requirement.extras)))
    return found & pins().keys()


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:  # for another platform
        return []


def _lock(path: Path, names: set[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "pins.txt"
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in pins().items() if name in names))
        # Local options (PIP_FIND_LINKS of a machine) must not decide what all users install.
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            "--no-config",
            "--no-deps",
            "--universal",
            "--no-header",
        ]
        command += ["--generate-hashes", "--no-annotate", "--quiet", "--output-file", f"{folder}/out", str(wanted)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        path.write_text(_HEAD[path] + Path(folder, "out").read_text())


if __name__ == "__main__":
    needed = serving()
    _lock(SERVING, needed)
    _lock(DEVELOPMENT, pins().keys() - needed)
