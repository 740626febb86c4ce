"""Modules of this repository that an import loads, for tests of what depends on their code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

from tests.support import ROOT

_PROGRAM = """
import json, sys
from importlib import import_module
for name in sys.argv[1:]:
    import_module(name)
print(json.dumps([file for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]))
"""


def repository_modules(*names: str) -> set[str]:
    """Paths, relative to the repository, of the modules that are loaded once these are."""
    command = [sys.executable, "-c", _PROGRAM, *names]
    files = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout)
    paths = [Path(file) for file in files if Path(file).is_relative_to(ROOT)]
    relative = {path.relative_to(ROOT) for path in paths}
    return {path.as_posix() for path in relative if path.parts[0] in ("app", "model")}


def not_matched(paths: Iterable[str], patterns: Collection[str]) -> set[str]:
    """Paths that none of these patterns matches, which are relative to the repository."""
    matched = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    return {*paths} - matched
