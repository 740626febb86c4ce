"""Detects the instruction-set level that kernels are compiled for.

A level is a name and the compiler's flags for it. x86-64 has three, so that a library built on one machine runs on
others of the same level (containers move); elsewhere the only level is the machine's own.
"""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path


class Unusable(ValueError):
    """The native kernels are no use here, built or not; the message says why."""


class BuildError(ValueError):
    """The native kernels cannot be built; the message says why and what to change, in one line."""


class NoCompiler(BuildError):
    """There is no C++ compiler."""


_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_NEEDS = {"avx512bf16": _AVX512 | {"avx512_bf16"}, "avx512": _AVX512, "avx2": _AVX2}  # best first
_NATIVE_FLAGS = {"x86_64": "-march=native", "aarch64": "-mcpu=native", "ppc64le": "-mcpu=native"}
_SAME_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


class UnsupportedCpu(Unusable):
    """This CPU is too old for the native kernels; the message says what it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTarget:
    """What the compiler may use of a CPU."""

    name: str
    machine: str
    flags: tuple[str, ...]
    cpu: str = ""
    """Tells CPUs apart where the flags do not (-march=native)."""


X86_LEVELS = (
    CpuTarget(name="avx512bf16", machine="x86_64", flags=("-march=x86-64-v4", "-mavx512bf16")),
    CpuTarget(name="avx512", machine="x86_64", flags=("-march=x86-64-v4",)),
    CpuTarget(name="avx2", machine="x86_64", flags=("-march=x86-64-v3",)),
)
"""Every level of x86-64, best first."""


def level_of(machine: str, system: str, cpuinfo: str) -> CpuTarget:
    """The best level of a CPU: what platform.machine() and .system() say, and the text of /proc/cpuinfo.

    Raises UnsupportedCpu.
    """
    machine = _SAME_MACHINES.get(machine.lower(), machine.lower())
    if machine != "x86_64" or system != "Linux":
        flag = _NATIVE_FLAGS.get(machine)
        cpu = hashlib.sha256("\n".join(sorted(_identity(cpuinfo))).encode()).hexdigest()
        return CpuTarget(name="native", machine=machine, flags=(flag,) if flag else (), cpu=cpu)
    # The cores of one machine may differ: what one of them lacks cannot be used.
    cores = [frozenset(flags.split()) for flags in re.findall(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)]
    if not cores:
        raise UnsupportedCpu("/proc/cpuinfo does not tell what this CPU can do")
    able = frozenset.intersection(*cores)
    for level in X86_LEVELS:
        if _NEEDS[level.name] <= able:
            return level
    raise UnsupportedCpu(f"this CPU has no {', '.join(sorted(_AVX2 - able))}, which the native kernels need")


def levels_to_carry(machine: str, system: str, cpuinfo: str) -> tuple[CpuTarget, ...]:
    """Every level that other machines of this kind may have, whatever this one has itself. Raises UnsupportedCpu."""
    try:
        own = level_of(machine, system, cpuinfo)
    except UnsupportedCpu:
        return X86_LEVELS
    return X86_LEVELS if own in X86_LEVELS else (own,)


def runs_here(level: CpuTarget) -> bool:
    """Whether this machine runs what was compiled for `level`."""
    try:
        own = this_level()
    except UnsupportedCpu:
        return False
    return level in (X86_LEVELS[X86_LEVELS.index(own) :] if own in X86_LEVELS else (own,))


def this_machine() -> tuple[str, str, str]:
    """Machine, system and the text of /proc/cpuinfo, where there is one."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    return platform.machine(), platform.system(), cpuinfo


def this_level() -> CpuTarget:
    """Of the machine that this runs on. Raises UnsupportedCpu."""
    return level_of(*this_machine())


def _identity(cpuinfo: str) -> set[str]:
    """Lines that tell one kind of CPU from another, without those that change while it runs (MHz)."""
    names = ("flags", "features", "isa", "cpu", "cpu implementer", "cpu part", "model", "cpu family")
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return {f"{name.strip()}:{value.strip()}" for name, _, value in lines if name.strip().lower() in names}
