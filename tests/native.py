"""The native sampler for tests: compiled once from its sources as they are, without the rest of the library."""

from __future__ import annotations

import os
import platform
import subprocess
from ctypes import CDLL
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "app/engine/native/source"
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def compiled(folder: Path, *flags: str) -> CDLL:
    """The kernels of draw.h; INKSTREAM_TEST_FLAGS are added, such as -fsanitize=address."""
    unit, library = folder / "draw.cpp", folder / "draw.so"
    unit.write_text('#include "draw.h"\n')
    flags = flags or (_level(),)
    extra = os.environ.get("INKSTREAM_TEST_FLAGS", "").split()
    command = ["g++", *FLAGS, *WARNINGS, *flags, *extra, f"-I{SOURCE}", str(unit), "-o", str(library)]
    subprocess.run(command, check=True)
    return CDLL(str(library))


def _level() -> str:
    """The best that this processor can run."""
    if platform.machine() != "x86_64":
        return "-march=native"
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return "-march=x86-64-v4" if {"avx512f", "avx512bw", "avx512vl"} <= flags else "-march=native"
