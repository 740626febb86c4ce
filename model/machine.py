"""Facts about this machine that need no torch: its CPU, its memory, whether it may have a GPU."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

from model.cgroups import memory_limits

INSTALL_TORCH = "install torch, for instance by: pip install torch"
"""What messages advise where only torch could compute; inkstream on Linux does not bring it along."""
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def may_have_gpu() -> bool:
    """Whether torch might find a GPU: true where only torch can tell."""
    if sys.platform != "linux" or Path("/dev/kfd").exists():  # /dev/kfd: AMD's driver
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # NVIDIA's driver
    except OSError:
        return False
    return True


def has_native_bfloat16(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU multiplies bfloat16, on Linux."""
    flags = (line.partition(":")[2].split() for line in lines(cpu_info) if line.startswith(("flags", "Features")))
    return not _BFLOAT16_FLAGS.isdisjoint(next(flags, ()))


def free_memory(root: Path = Path("/")) -> int:
    """Free memory in bytes: of the machine, or what its use leaves of a cgroup's limit, whichever is least.

    root: directory of proc and sys.
    """
    fields = dict(line.split(":", 1) for line in lines(root / "proc/meminfo") if ":" in line)
    if "MemAvailable" not in fields:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = 1024 * int(fields["MemAvailable"].split()[0])
    return min([available, *(limit.left for limit in memory_limits(root))])


def describe_cpu(threads: int) -> str:
    """Human-readable name of the CPU, and the number of threads that compute on it."""
    names = (line.partition(":")[2].strip() for line in lines(Path("/proc/cpuinfo")) if line.startswith("model name"))
    return f"{next(names, platform.machine())}, {threads} threads"


def lines(path: Path) -> list[str]:
    """Lines of a file of the system; none if there is no such file."""
    return path.read_text().splitlines() if path.exists() else []
