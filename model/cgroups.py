"""Control groups (cgroups) of this process, versions 1 and 2: what limits its memory and CPU time, and its kills.

A cgroup's limits hold for its whole subtree, so every ancestor counts: a service may be limited by its unit
(systemd's MemoryMax and CPUQuota), its slice, its container or its pod. Where the process cannot see its ancestors, as
in a container with a namespace of its own, the top of what it sees is the container.

    /proc/self/cgroup      the path of the process in each hierarchy
    /proc/self/mountinfo   where each hierarchy is mounted, and which of its folders is the top of the mount
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ROOT = Path("/")
_UNLIMITED_V1 = 1 << 60
"""Version 1 has no word for no limit, but the largest multiple of a page."""


class _Hierarchy(NamedTuple):
    version: int
    mount: Path
    top: PurePosixPath
    """The path of the folder that is mounted there."""
    own: PurePosixPath
    """The path of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A limit of memory that holds for this process and others."""

    limit: int
    """Bytes."""
    used: int
    """Bytes, without the page cache that the kernel would drop first."""
    name: str
    """Path of the cgroup."""

    @property
    def left(self) -> int:
        """Bytes that can still be allocated."""
        return max(0, self.limit - self.used)


def memory_limits(root: Path = _ROOT) -> list[MemoryLimit]:
    """The limits of this process's cgroup and its ancestors; none if nothing limits its memory.

    root: directory of proc and sys.
    """
    found = []
    for version, folder in _folders("memory", root):
        limit = _limit_v2(folder) if version == 2 else _limit_v1(folder)
        if limit is not None:
            used = _used_v2(folder) if version == 2 else _used_v1(folder)
            name = "/" + folder.relative_to(root).as_posix()
            found.append(MemoryLimit(limit=limit, used=min(used, limit), name=name))
    return found


def cpu_quotas(root: Path = _ROOT) -> list[float]:
    """The CPUs whose time this process's cgroup and its ancestors may use; none if nothing limits it."""
    found = []
    for version, folder in _folders("cpu", root):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file; "max" is no number, and no limit
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota = int((folder / "cpu.cfs_quota_us").read_text())
                period = int((folder / "cpu.cfs_period_us").read_text())
            if quota > 0:  # version 1: -1 is no limit
                found.append(quota / period)
    return found


def count_kills(root: Path = _ROOT) -> int:
    """Kills for lack of memory so far, in this process's cgroup and by the whole system; grows with each.

    A kill may count several times, and one outside the cgroup counts, too.
    """
    kills = 0
    for version, folder in _folders("memory", root):
        file = folder / ("memory.events" if version == 2 else "memory.oom_control")
        kills += _fields(file).get("oom_kill", 0)
    return kills + _fields(root / "proc/vmstat").get("oom_kill", 0)


def _folders(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """The version and folder of this process's cgroup and of each ancestor that is visible, upwards.

    A machine may have both versions, with each controller in one of them: the other lacks its files.
    """
    for version, mount, top, own in _hierarchies(controller, root):
        try:
            below = own.relative_to(top)
        except ValueError:  # the path is the host's, and the mount shows this container only
            below = PurePosixPath()
        folder = mount / below
        if ".." in below.parts or not folder.is_dir():  # outside the namespace, or of another one
            folder = mount
        for each in (folder, *folder.parents):
            if each.is_relative_to(mount):
                yield version, each


def _hierarchies(controller: str, root: Path) -> Iterator[_Hierarchy]:
    mounts = dict(_mounts(controller, root))
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            version = 2 if (number, controllers) == ("0", "") else 1
            if path and version in mounts and (version == 2 or controller in controllers.split(",")):
                mount, top = mounts[version]
                yield _Hierarchy(version, mount, top, PurePosixPath(path))


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, tuple[Path, PurePosixPath]]]:
    """For each version: the mount that shows the controller, and its top."""
    yield 2, (root / "sys/fs/cgroup", PurePosixPath("/"))  # unless mountinfo knows better
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            fields, kind = before.split(" "), after.split(" ")
            if len(fields) < 5 or len(kind) < 3:
                continue
            top, mount = PurePosixPath(_unescaped(fields[3])), root / _unescaped(fields[4]).lstrip("/")
            if kind[0] == "cgroup2":
                yield 2, (mount, top)
            elif kind[0] == "cgroup" and controller in kind[2].split(","):
                yield 1, (mount, top)


def _unescaped(path: str) -> str:
    r"""mountinfo writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _limit_v2(folder: Path) -> int | None:
    """memory.max, or memory.high if that is less: beyond it the kernel slows the processes down to a crawl."""
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(folder / name)) is not None]
    return min(limits, default=None)


def _used_v2(folder: Path) -> int:
    stat = _fields(folder / "memory.stat")
    cache = stat.get("inactive_file", 0) + stat.get("active_file", 0) - stat.get("file_mapped", 0)
    return _without(_number(folder / "memory.current") or 0, max(0, cache) + stat.get("slab_reclaimable", 0))


def _limit_v1(folder: Path) -> int | None:
    """hierarchical_memory_limit also knows of ancestors that are not visible."""
    limits = [
        _number(folder / "memory.limit_in_bytes"),
        _fields(folder / "memory.stat").get("hierarchical_memory_limit"),
    ]
    return min((limit for limit in limits if limit is not None and limit < _UNLIMITED_V1), default=None)


def _used_v1(folder: Path) -> int:
    stat = _fields(folder / "memory.stat")
    cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0) - stat.get("total_mapped_file", 0)
    return _without(_number(folder / "memory.usage_in_bytes") or 0, max(0, cache))


def _without(used: int, reclaimable: int) -> int:
    """`used` without the page cache that makes room on demand: not the one of mapped files (code, weights)."""
    return max(0, used - reclaimable)


def _number(file: Path) -> int | None:
    """The number in a file; None if there is no such file, or it says `max`."""
    with suppress(OSError, ValueError):
        text = file.read_text().strip()
        return int(text) if text.isdecimal() else None
    return None


def _fields(file: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line; empty if there is no such file."""
    with suppress(OSError, ValueError):
        pairs = (line.split() for line in file.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
    return {}
