"""Detects the instruction-set level that kernels are compiled for.

A level is a name and its compiler flags. x86-64 has four and ARM has one, so that a library built on one machine runs
on others of the same level (containers move).
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


class KernelsUnavailable(ValueError):
    """The native kernels cannot be used here, built or not; the message says why."""


class BuildError(ValueError):
    """The native kernels cannot be built; the message says why and what to change, in one line."""


class CompilerNotFound(BuildError):
    """No C++ compiler was found."""


_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_AVX512_BF16 = _AVX512 | {"avx512_bf16"}
_REQUIRED_FLAGS = {
    "amx": _AVX512_BF16 | {"amx_tile", "amx_bf16"},
    "avx512bf16": _AVX512_BF16,
    "avx512": _AVX512,
    "avx2": _AVX2,
}
_MACHINE_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}


class UnsupportedCpu(KernelsUnavailable):
    """The native kernels do not support this CPU; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTarget:
    """An instruction-set level that the compiler targets."""

    name: str
    machine: str
    flags: tuple[str, ...]


AMX = CpuTarget(name="amx", machine="x86_64", flags=("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"))
"""Tiles multiply bfloat16 and round differently; all other levels compute the same bits."""
X86_LEVELS = (
    AMX,
    CpuTarget(name="avx512bf16", machine="x86_64", flags=("-march=x86-64-v4", "-mavx512bf16")),
    CpuTarget(name="avx512", machine="x86_64", flags=("-march=x86-64-v4",)),
    CpuTarget(name="avx2", machine="x86_64", flags=("-march=x86-64-v3",)),
)
"""Every level of x86-64, best first."""
NEON = CpuTarget(name="neon", machine="aarch64", flags=("-march=armv8-a",))
"""Every 64-bit ARM CPU. Instructions for bfloat16 round otherwise, so a level with them would compute other bits."""
LEVELS = (*X86_LEVELS, NEON)


_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA = 158, 0x1023, 18  # as in the headers of Linux for x86-64


def request_tiles() -> bool:
    """Asks Linux to let this process use the tiles of AMX; returns whether it may.

    Kernels before 5.16 and sandboxes refuse, and Linux does where a thread's signal stack is too small. The permission
    holds for all threads, also later ones.
    """
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _TILE_DATA) == 0)


def level_of(machine: str, cpuinfo: str, may_use_tiles: Callable[[], bool] = request_tiles) -> CpuTarget:
    """The best level of a CPU, from platform.machine() and the text of /proc/cpuinfo.

    `may_use_tiles` is called for a CPU that has them. Raises UnsupportedCpu.
    """
    if levels_of(machine) == (NEON,):
        return NEON
    # The cores of one machine may differ; only features that all of them have can be used.
    cores = [frozenset(flags.split()) for flags in re.findall(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)]
    if not cores:
        raise UnsupportedCpu("/proc/cpuinfo does not list the features of this CPU")
    supported = frozenset.intersection(*cores)
    for level in X86_LEVELS:
        if _REQUIRED_FLAGS[level.name] <= supported and (level != AMX or may_use_tiles()):
            return level
    raise UnsupportedCpu(f"this CPU has no {', '.join(sorted(_AVX2 - supported))}, which the native kernels need")


def levels_of(machine: str) -> tuple[CpuTarget, ...]:
    """All levels of an architecture (platform.machine()), best first. Raises UnsupportedCpu."""
    name = _MACHINE_ALIASES.get(machine.lower(), machine.lower())
    if levels := tuple(level for level in LEVELS if level.machine == name):
        return levels
    raise UnsupportedCpu(f"this CPU is neither x86-64 nor 64-bit ARM, but {machine}")


def runs_here(level: CpuTarget) -> bool:
    """Whether this machine can run code compiled for `level`."""
    try:
        detected = this_level()
    except UnsupportedCpu:
        return False
    levels = levels_of(detected.machine)
    return level in levels[levels.index(detected) :]


def this_level() -> CpuTarget:
    """The best level of this machine, which this process may use from then on. Raises UnsupportedCpu."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    return level_of(platform.machine(), cpuinfo)
