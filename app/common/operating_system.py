"""Operating system interface: CPU cores, the terminal, the parent-death signal."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def available_cores(root: Path = Path("/"), affinity: int | None = None) -> int:
    """At least 1. A limit of 2.5 cores is 2: threads that spin use up what is left, and then all of them stand still.

    root: where /proc and /sys are; affinity: how many cores the scheduler gives us, asked for where None.
    """
    cores = affinity or _affinity()
    return max(1, int(min([cores, *_quotas(root)])))


def _affinity() -> int:
    # macOS and Windows have no such call, and no cgroups.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas(root: Path) -> Iterator[float]:
    """Every limit on the way from our cgroup to the root: the smallest holds."""
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / controllers
            ours = mount / path.lstrip("/")
            # In a container our own path may be the host's, which is not there; its mount then is what holds for us.
            for folder in (ours, *ours.parents):
                if folder.is_relative_to(mount) and (quota := _quota(folder)) is not None:
                    yield quota


def _quota(folder: Path) -> float | None:
    """Cores, where this cgroup has a limit of its own."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        microseconds = int((folder / "cpu.cfs_quota_us").read_text())
        period_microseconds = int((folder / "cpu.cfs_period_us").read_text())
        return None if microseconds < 0 else microseconds / period_microseconds
    return None


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """From now on the kernel kills this process when its parent ends, even while it hangs or computes.

    Strictly when the *thread* ends that started it: ours are started from the event loop, which runs in the main
    thread. Of a parent that was gone before this call only the end of the pipe tells; elsewhere than on Linux always.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
