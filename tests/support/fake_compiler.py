"""A fake C++ compiler that runs a test's script and counts its calls."""

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
    """File with a line for each compilation: the process id."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the compilations, in order."""
        return [int(line) for line in self.calls.read_text().split()] if self.calls.exists() else []


def fake_compiler(folder: Path, product: Path, *, before: str = "") -> FakeCompiler:
    """Makes a compiler that runs `before` (shell), then copies `product` to the output path."""
    script, calls = folder / "fake-c++", folder / "calls"
    lines = ["#!/bin/sh", 'if [ "$1" = --version ]; then echo "fake 1.0"; exit; fi', f'echo $$ >> "{calls}"', before]
    script.write_text("\n".join([*lines, "for last; do :; done", f'cp "{product}" "$last"\n']))
    script.chmod(0o755)
    return FakeCompiler(script, calls)


def compile_library(folder: Path, source: str) -> Path:
    """Compiles C++ source to a library with the machine's compiler; skips the test if there is none."""
    compiler = shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (folder / "source.cpp").write_text(source)
    library = folder / "library.so"
    subprocess.run([compiler, "-shared", "-fPIC", folder / "source.cpp", "-o", library], check=True, timeout=60)
    return library
