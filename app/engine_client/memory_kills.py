"""Says whether the kernel killed an engine because memory ran out: the exit status only says SIGKILL."""

from __future__ import annotations

import signal
from collections import deque
from pathlib import Path

from model.cgroups import count_kills, memory_limits
from model.machine import free_memory

_OBSERVATIONS = 10
_REMEDY = "give the service more memory, or lower --kv-blocks, --max-context or --max-running"


class MemoryKills:
    """Counts the kernel's kills for lack of memory, in recent observations.

    The counters cover more than the engine, so only kills of the last observations count: a SIGKILL by a user, long
    after the kill of some other process, is not the kernel's.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        """`root`: directory of proc and sys."""
        self._root = root
        self._counts = deque([count_kills(root)], _OBSERVATIONS)

    def observe(self) -> None:
        """Counts the kills so far; call it every second or so."""
        self._counts.append(count_kills(self._root))

    def explanation(self, exit_code: int) -> str:
        """What the log adds to an exit by this status; empty if memory was not the reason."""
        if exit_code != -signal.SIGKILL or count_kills(self._root) <= self._counts[0]:
            return ""
        limits = memory_limits(self._root)
        if limits:
            least = min(limits, key=lambda limit: limit.left)
            where = f"{least.name} may use {_mib(least.limit)} (mem_limit, MemoryMax, resources.limits.memory)"
        else:
            where = f"no cgroup limits it, and the machine has {_mib(free_memory(self._root))} left"
        return f": out of memory, the kernel killed it: {where}: {_REMEDY}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
