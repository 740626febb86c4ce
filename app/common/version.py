"""The version of this code: git's commit in a checkout, and in a wheel what the build wrote here.

X.Y.Z                     the commit with the tag vX.Y.Z, where RELEASE is X.Y.Z
X.Y.(Z+1).devN            a later commit; N is the number of commits up to it, so every commit has a greater version
X.Y.(Z+1).dev0+DATE.gSHA  a shallow clone, where git cannot count: different for every commit, and in order of time
X.Y.(Z+1).dev0+gSHA       a process in a checkout, which does not wait for git
...+tree.HASH             sources without git, or changed since the commit: different for different files

inkstream/build_version.py makes all but the fourth.
"""

from __future__ import annotations

import re
from pathlib import Path

RELEASE = "0.2.0"
"""The newest release in CHANGELOG.md; CONTRIBUTING.md says how to make one."""
BUILT_VERSION = ""
"""setup.py writes the version here, in the wheel's copy of this file."""
_ROOT = Path(__file__).resolve().parents[2]
_major, _minor, _patch = RELEASE.split(".")
NEXT = f"{_major}.{_minor}.{int(_patch) + 1}"
"""The release that commits after RELEASE lead to."""


def checkout_version(root: Path = _ROOT) -> str:
    """The version by two small files that name the commit: running git would take 20 ms of every start."""
    commit = _commit(root / ".git")
    return f"{NEXT}.dev0+g{commit[:9]}" if commit else f"{NEXT}.dev0"


def _commit(git: Path) -> str:
    """The commit of HEAD; empty if it cannot be read."""
    try:
        if git.is_file():  # a worktree
            git = (git.parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if head.startswith("ref: "):
            head = _resolve(git, head.removeprefix("ref: "))
    except (OSError, UnicodeError):
        return ""
    return head if re.fullmatch(r"[0-9a-f]{40,64}", head) else ""


def _resolve(git: Path, reference: str) -> str:
    common = git / "commondir"
    shared = (git / common.read_text().strip()) if common.exists() else git
    for folder in (git, shared):
        if (path := folder / reference).is_file():
            return path.read_text().strip()
    packed = (shared / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {reference}")), "")


VERSION = BUILT_VERSION or checkout_version()
"""The version that `--version`, receipts, metrics and /openapi.json show."""
