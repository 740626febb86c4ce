"""The engine's thread count equals the available cores, in a container as outside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.common.operating_system import available_cores


def _root(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_version_2_limits_the_cores(tmp_path: Path, limit: str, cores: int) -> None:
    """In a container of its own cgroup namespace: we are at the root of what is mounted."""
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{limit}\n"}
    assert available_cores(_root(tmp_path, files), affinity=8) == cores


def test_the_smallest_limit_on_the_way_to_the_root_holds(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a.slice/b.service\n",
        "sys/fs/cgroup/a.slice/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/a.slice/b.service/cpu.max": "max 100000\n",
        "sys/fs/cgroup/c.slice/cpu.max": "100000 100000\n",
    }
    assert available_cores(_root(tmp_path, files), affinity=8) == 3


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("400000", 4), ("30000", 1)])
@pytest.mark.parametrize("path", ["/", "/docker/0123", "/not/mounted/here"])
def test_version_1_limits_the_cores(tmp_path: Path, quota: str, cores: int, path: str) -> None:
    ours = f"sys/fs/cgroup/cpu,cpuacct{'/docker/0123' if path == '/docker/0123' else ''}"
    files = {
        "proc/self/cgroup": f"11:memory:{path}\n5:cpu,cpuacct:{path}\n1:name=systemd:{path}\n",
        "sys/fs/cgroup/memory/cpu.cfs_quota_us": "1\n",
        f"{ours}/cpu.cfs_quota_us": f"{quota}\n",
        f"{ours}/cpu.cfs_period_us": "100000\n",
    }
    assert available_cores(_root(tmp_path, files), affinity=8) == cores


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3", "100000 0"])
def test_what_cannot_be_read_is_no_limit(tmp_path: Path, text: str) -> None:
    assert available_cores(tmp_path, affinity=8) == 8
    for cgroup in ("0::/\n", text):
        files = {"proc/self/cgroup": cgroup, "sys/fs/cgroup/cpu.max": text}
        assert available_cores(_root(tmp_path, files), affinity=8) == 8


def test_never_more_than_the_machine_has() -> None:
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
