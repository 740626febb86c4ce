"""Operating system interface: GPUs, ports, open files, priorities, the parent-death signal."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent exits, even while it hangs or computes. Linux only.

    Strictly, when the *thread* that started it exits: start child processes from the main thread or from threads that
    live as long as the process, such as an executor's. If the parent exited before this call, or on other
    systems, only the closed pipe reveals it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def lower_priority(nice: int) -> None:
    """Lowers the priority of the calling thread; on Linux each has its own nice value, elsewhere nothing happens."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + nice))


def anonymous_memory(pid: int) -> int:
    """Bytes of memory of a process that no file backs; 0 if that cannot be known."""
    with suppress(OSError):
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return 1024 * int(found[1]) if found else 0
    return 0


_CUDA_LIBRARY = "libcuda.so.1"
_HIDDEN = ("", "-1", "NoDevFiles")


def why_no_cuda() -> str:
    """Why torch can certainly not use a GPU, found without importing it; empty if it may be able to."""
    if not _is_built_for_gpus():
        return "the installed torch computes on CPUs only: install a build for GPUs (docs/gpu.md)"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in _HIDDEN:
        return "the variable CUDA_VISIBLE_DEVICES hides every GPU: unset it"
    try:
        if sys.platform == "linux":
            ctypes.CDLL(_CUDA_LIBRARY)
    except OSError:
        return f"this machine has no NVIDIA driver ({_CUDA_LIBRARY}): install it, or give the container the GPU"
    return ""


def _is_built_for_gpus() -> bool:
    """Whether torch's own file of versions names CUDA or ROCm; also true if there is no such file."""
    spec = importlib.util.find_spec("torch")
    for folder in spec.submodule_search_locations or [] if spec else []:
        with suppress(OSError):
            text = (Path(folder) / "version.py").read_text(encoding="utf-8")
            builds = re.findall(r"^(?:cuda|hip)\b[^=\n]*= *(.+)$", text, re.MULTILINE)
            return not builds or any(build.strip() != "None" for build in builds)
    return True


def listener_on(port: int) -> str:
    """Name and number of a process of this machine that listens on a TCP port; empty if that cannot be known."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").glob("[0-9]*") if sockets else ():
        with suppress(OSError):  # it has ended, or belongs to another user
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):  # noqa: PTH115 (not a path)
                is_service = re.search(
                    rb"(^|[/.\0])(app|inkstream)\0serve\0", (process / "cmdline").read_bytes() + b"\0"
                )
                name = "another inkstream" if is_service else (process / "comm").read_text().strip()
                return f"{name}, process {process.name}"
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


RESERVED_CONNECTIONS = 32
"""Connections beyond the limit that are accepted, to be answered with an error."""
_RESERVED_FILES = 64
"""Descriptors reserved for other uses: pipes to the engine, static files, the event loop."""
_MIN_FILES = 128
"""With fewer descriptors the service would fail at random."""


def ensure_file_limit(requested: int) -> int:
    """Raises the soft limit of open files for `requested` connections, as far as allowed; returns how many fit.

    Raises ValueError if the limit is too low for the service to start.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return requested
    needed = max(_MIN_FILES, requested + RESERVED_CONNECTIONS + _RESERVED_FILES)
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        if soft < _MIN_FILES:
            raise ValueError(f"the limit of open files is {soft}: raise ulimit -n to at least {_MIN_FILES}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(requested, soft - RESERVED_CONNECTIONS - _RESERVED_FILES))


def is_in_memory(folder: Path) -> bool:
    """Whether `folder` is in memory, which counts against a container's limit. Raises OSError."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(fields[fields.index("-") + 1] in ("tmpfs", "ramfs") for fields in mounts if fields[2] == number)
