"""Limits of memory and CPU time in made-up and real trees of cgroups: versions 1 and 2, both, nested, in containers."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from app.common.cpu_topology import read_topology
from model.cgroups import count_kills, cpu_quotas, memory_limits
from model.machine import free_memory
from tests.support.cgroups import own_cgroup, run_in

MIB = 1 << 20
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = """31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
"""
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\n"  # 8 GiB
NONE_V1 = "9223372036854771712\n"


def _tree(root: Path, files: dict[str, str], *, mounts: str = V2, own: str = "0::/\n") -> Path:
    tree = {"proc/self/cgroup": own, "proc/self/mountinfo": mounts, "proc/meminfo": MEMINFO, **files}
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _v2(folder: str, maximum: int | str, current: int = 0, stat: str = "", **others: str) -> dict[str, str]:
    where = f"sys/fs/cgroup/{folder}".rstrip("/")
    return {
        f"{where}/memory.max": f"{maximum}\n",
        f"{where}/memory.current": f"{current}\n",
        f"{where}/memory.stat": stat,
        **{f"{where}/memory.{name}": f"{text}\n" for name, text in others.items()},
    }


def _v1(folder: str, limit: int | str, usage: int = 0, stat: str = "") -> dict[str, str]:
    where = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    return {
        f"{where}/memory.limit_in_bytes": f"{limit}\n",
        f"{where}/memory.usage_in_bytes": f"{usage}\n",
        f"{where}/memory.stat": stat,
    }


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert free_memory(_tree(tmp_path, {}, mounts="", own="")) == 8192 * MIB
    assert memory_limits(tmp_path / "nowhere") == cpu_quotas(tmp_path / "nowhere") == []
    assert count_kills(tmp_path / "nowhere") == 0


def test_container_with_its_own_namespace_is_limited_less_its_use(tmp_path: Path) -> None:
    root = _tree(tmp_path, _v2("", 1024 * MIB, 300 * MIB))
    assert free_memory(root) == 724 * MIB


def test_units_memory_max_is_found_from_the_host(tmp_path: Path) -> None:
    """systemd: MemoryMax=2G in the unit, none in its slice, and the root has no such files."""
    own = "0::/system.slice/inkstream.service\n"
    files = _v2("system.slice", "max", 4096 * MIB) | _v2("system.slice/inkstream.service", 2048 * MIB, 500 * MIB)
    assert free_memory(_tree(tmp_path, files, own=own)) == 1548 * MIB
    assert [limit.name for limit in memory_limits(tmp_path)] == ["/sys/fs/cgroup/system.slice/inkstream.service"]


def test_ancestor_with_the_least_left_applies(tmp_path: Path) -> None:
    """The slice's limit is larger, but its other units use it."""
    own = "0::/a.slice/b.service/child\n"
    files = (
        _v2("a.slice", 3072 * MIB, 2900 * MIB)
        | _v2("a.slice/b.service", 1024 * MIB, 100 * MIB)
        | _v2("a.slice/b.service/child", "max", 100 * MIB)
        | _v2("c.slice", 10 * MIB, 10 * MIB)
    )
    assert free_memory(_tree(tmp_path, files, own=own)) == 172 * MIB


def test_memory_high_limits_too(tmp_path: Path) -> None:
    root = _tree(tmp_path, _v2("", 1024 * MIB, 100 * MIB, high=str(512 * MIB)))
    assert free_memory(root) == 412 * MIB
    assert free_memory(_tree(tmp_path, _v2("", "max", 100 * MIB, high=str(300 * MIB)))) == 200 * MIB


def test_page_cache_that_is_not_mapped_makes_room(tmp_path: Path) -> None:
    stat = f"""anon {200 * MIB}
file {600 * MIB}
file_mapped {50 * MIB}
inactive_file {400 * MIB}
active_file {150 * MIB}
shmem {50 * MIB}
slab_reclaimable {20 * MIB}
"""
    root = _tree(tmp_path, _v2("", 1024 * MIB, 1000 * MIB, stat))
    assert free_memory(root) == (1024 - 1000 + 400 + 150 - 50 + 20) * MIB
    names = {"inactive_file": 1, "total_inactive_file": 400, "total_active_file": 150, "total_mapped_file": 600}
    stat_v1 = "".join(f"{name} {size * MIB}\n" for name, size in names.items())
    files = _v1("", 1024 * MIB, 1000 * MIB, stat_v1)
    assert free_memory(_tree(tmp_path / "v1", files, mounts=V1, own="4:memory:/\n")) == 24 * MIB


def test_nothing_is_left_beyond_the_limit(tmp_path: Path) -> None:
    assert free_memory(_tree(tmp_path, _v2("", 100 * MIB, 200 * MIB))) == 0


@pytest.mark.parametrize("mounts", [V1, HYBRID])
def test_version_1_and_both_versions(tmp_path: Path, mounts: str) -> None:
    own = "9:name=systemd:/x\n4:memory:/a/b\n1:cpu,cpuacct:/a/b\n0::/other\n"
    files = _v1("a/b", 2048 * MIB, 48 * MIB) | _v1("a", 1024 * MIB, 24 * MIB) | _v1("", NONE_V1, 9000 * MIB)
    cpu = "sys/fs/cgroup/cpu,cpuacct"
    files |= {f"{cpu}/a/cpu.cfs_quota_us": "150000\n", f"{cpu}/a/cpu.cfs_period_us": "100000\n"}
    files |= {f"{cpu}/a/b/cpu.cfs_quota_us": "-1\n", f"{cpu}/a/b/cpu.cfs_period_us": "100000\n"}
    root = _tree(tmp_path, files, mounts=mounts, own=own)
    assert free_memory(root) == 1000 * MIB
    assert cpu_quotas(root) == [1.5]
    assert read_topology(root, range(8)).n_cpus == 1


def test_container_of_version_1_sees_its_own_folder_at_the_mount(tmp_path: Path) -> None:
    """Docker without cgroup namespaces: the path is the host's, and so is the top of the mount."""
    mounts = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
    files = _v1("", 512 * MIB, 12 * MIB, f"hierarchical_memory_limit {400 * MIB}\n")
    for own in ("4:memory:/docker/abc\n", "4:memory:/\n", "4:memory:/kubepods/pod1/abc\n"):
        assert free_memory(_tree(tmp_path, files, mounts=mounts, own=own)) == 388 * MIB, "a parent's limit counts"
    nested = _v1("worker", 100 * MIB)
    root = _tree(tmp_path, files | nested, mounts=mounts, own="4:memory:/docker/abc/worker\n")
    assert free_memory(root) == 100 * MIB


@pytest.mark.parametrize("path", ["/", "/../../system.slice/x", "/kubepods.slice/pod1/gone", "/a b"])
def test_paths_outside_the_namespace_fall_back_to_the_mount(tmp_path: Path, path: str) -> None:
    assert free_memory(_tree(tmp_path, _v2("", 256 * MIB, MIB), own=f"0::{path}\n")) == 255 * MIB


def test_mounts_at_other_places_and_with_spaces_are_found(tmp_path: Path) -> None:
    mounts = "30 23 0:26 / /mnt/c\\040g rw shared:4 - cgroup2 cgroup2 rw\n"
    files = {"mnt/c g/x/memory.max": f"{64 * MIB}\n", "mnt/c g/x/memory.current": "0\n"}
    assert free_memory(_tree(tmp_path, files, mounts=mounts, own="0::/x\n")) == 64 * MIB


@pytest.mark.parametrize("text", ["", "max", "nonsense", "\x00", "-1"])
def test_unreadable_files_set_no_limit(tmp_path: Path, text: str) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name in ("memory.max", "memory.current", "memory.stat", "cpu.max")}
    root = _tree(tmp_path, files)
    assert free_memory(root) == 8192 * MIB
    assert cpu_quotas(root) == []
    for mounts, own in ((text, "0::/\n"), (V2, text)):
        assert free_memory(_tree(tmp_path, {}, mounts=mounts, own=own)) == 8192 * MIB


def test_smallest_cpu_quota_up_to_the_root_applies(tmp_path: Path) -> None:
    """systemd: CPUQuota=250% in the unit, and less in its slice."""
    files = {"sys/fs/cgroup/a.slice/cpu.max": "200000 100000\n", "sys/fs/cgroup/a.slice/b/cpu.max": "250000 100000\n"}
    root = _tree(tmp_path, files, own="0::/a.slice/b\n")
    assert sorted(cpu_quotas(root)) == [2.0, 2.5]
    assert read_topology(root, range(8)).quota == 2.0
    assert read_topology(_tree(tmp_path / "none", {}), range(8)).quota == math.inf


def test_kills_are_counted_in_the_cgroup_and_in_the_system(tmp_path: Path) -> None:
    root = _tree(tmp_path, {"proc/vmstat": "nr_free_pages 7\noom_kill 2\n"})
    assert count_kills(root) == 2
    _tree(tmp_path, {"sys/fs/cgroup/memory.events": "low 0\noom 3\noom_kill 1\noom_group_kill 0\n"})
    assert count_kills(root) == 3
    files = {"sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"}
    assert count_kills(_tree(tmp_path / "v1", files, mounts=V1, own="4:memory:/\n")) == 5


@pytest.mark.slow
def test_real_cgroup_limits_the_free_memory() -> None:
    program = """
from model.cgroups import memory_limits
from model.machine import free_memory
before = free_memory()
held = bytearray(b"x") * (100 << 20)
print(min(limit.limit for limit in memory_limits()), before, free_memory())
"""
    with own_cgroup(300 * MIB) as cgroup:
        ran = run_in(cgroup, sys.executable, "-c", program)
    limit, before, after = map(int, ran.stdout.split())
    assert limit == 300 * MIB, ran.stderr
    assert 200 * MIB < before <= limit
    assert 80 * MIB < before - after < 120 * MIB


@pytest.mark.slow
def test_real_kill_is_counted() -> None:
    before = count_kills()
    with own_cgroup(50 * MIB) as cgroup:
        ran = run_in(cgroup, sys.executable, "-c", "held = bytearray(b'x') * (500 << 20)")
    if ran.returncode == 0:
        pytest.skip("the kernel swaps instead")
    assert ran.returncode == -9
    assert count_kills() > before
