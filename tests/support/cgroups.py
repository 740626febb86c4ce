"""Real cgroups with a limit of memory, below the one of the tests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from model import cgroups
from tests.support import ROOT


@contextlib.contextmanager
def own_cgroup(limit: int) -> Iterator[Path]:
    """A cgroup below this process's own with a limit of memory in bytes; skips where the machine does not allow one."""
    folders = list(cgroups._folders("memory", Path("/")))
    if not folders:
        pytest.skip("no cgroup has the memory controller")
    version, parent = folders[0]
    child = parent / f"inkstream-test-{os.getpid()}"
    try:
        child.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error.strerror}")
    try:
        file = child / ("memory.max" if version == 2 else "memory.limit_in_bytes")
        if not file.exists():
            pytest.skip("the memory controller is not delegated")
        file.write_text(str(limit))
        yield child
    finally:
        _remove(child)


def _remove(cgroup: Path) -> None:
    """Killed processes leave it with a delay."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            cgroup.rmdir()
            return
        time.sleep(0.1)
    cgroup.rmdir()


def entering(cgroup: Path) -> list[str]:
    """A command that runs the command after it in a cgroup."""
    enter = f"open({str(cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
    return [sys.executable, "-c", f"import os, sys; {enter}; os.execvp(sys.argv[1], sys.argv[1:])"]


def run_in(cgroup: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a cgroup."""
    return subprocess.run(
        [*entering(cgroup), *command], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
