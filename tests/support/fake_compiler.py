"""A fake C++ compiler: does what a test scripts, instantly, and counts its calls."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class FakeCompiler:
    """A shell script: set CXX to `path`."""

    path: Path
    calls: Path
    """A line with the process id for every time that it compiled."""

    @property
    def pids(self) -> list[int]:
        """Of the processes that compiled, one after the other."""
        return [int(line) for line in self.calls.read_text().split()] if self.calls.exists() else []


def fake_compiler(folder: Path, product: Path, *, before: str = "") -> FakeCompiler:
    """Runs `before` (shell), then copies `product` to where the library is to be."""
    script, calls = folder / "fake-c++", folder / "calls"
    lines = ["#!/bin/sh", 'if [ "$1" = --version ]; then echo "fake 1.0"; exit; fi', f'echo $$ >> "{calls}"', before]
    script.write_text("\n".join([*lines, "for last; do :; done", f'cp "{product}" "$last"\n']))
    script.chmod(0o755)
    return FakeCompiler(script, calls)


def compiled(folder: Path, source: str) -> Path:
    """A library of this C++ source, by the machine's own compiler; skips the test where there is none."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to make a library with")
    (folder / "source.cpp").write_text(source)
    library = folder / "library.so"
    subprocess.run([compiler, "-shared", "-fPIC", folder / "source.cpp", "-o", library], check=True, timeout=60)
    return library
