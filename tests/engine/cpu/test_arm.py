"""The kernels on ARM, cross-compiled and run by QEMU: the same bits as on this machine without AMX."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.engine.cpu.toolchain.builder import find_compiler
from app.engine.cpu.toolchain.cpu_target import AMX, NEON, X86_LEVELS, CpuTarget, this_level
from app.engine.cpu.toolchain.library_cache import FLAGS, SOURCE

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROGRAM = Path(__file__).parents[2] / "support/engine/cpu_conformance.cpp"


def _digests(
    compiler: Sequence[str], level: CpuTarget, folder: Path, *more: str, emulator: Sequence[str] = ()
) -> dict[str, str]:
    """Output of the test program, compiled for a level with the flags of the library, and `more`."""
    flags = [flag for flag in (*FLAGS, *level.flags, *more) if flag not in ("-shared", "-fPIC")]
    program = folder / level.name
    subprocess.run([*compiler, *flags, "-static", "-I", SOURCE, PROGRAM, "-o", program], check=True)
    lines = subprocess.run([*emulator, program], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: digest for name, _, digest in (line.rpartition(" ") for line in lines)}


@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER}, {EMULATOR}")
def test_arm_computes_the_same_bits(tmp_path: Path) -> None:
    level = X86_LEVELS[1] if this_level() == AMX else this_level()
    # Without optimization, in a third of the time: test_executor.py compares the library's own levels.
    here = _digests(find_compiler().command, level, tmp_path, "-Og")
    assert len(set(here.values())) == len(here) >= 15
    assert _digests([COMPILER], NEON, tmp_path, emulator=[EMULATOR]) == here
