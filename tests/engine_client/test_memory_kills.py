"""The log says that memory ran out where the kernel killed an engine for it, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine_client.memory_kills import MemoryKills

_EVENTS = "sys/fs/cgroup/memory.events"


def _machine(root: Path, *, limit: str = "max") -> Path:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/meminfo": "MemAvailable: 102400 kB\n",
        "proc/vmstat": "oom_kill 4\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        _EVENTS: "oom 1\noom_kill 1\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_kill_for_lack_of_memory_names_the_limit_and_the_remedy(tmp_path: Path) -> None:
    kills = MemoryKills(_machine(tmp_path, limit=str(512 << 20)))
    (tmp_path / _EVENTS).write_text("oom 2\noom_kill 2\n")
    text = kills.explanation(-9)
    assert text.startswith(
        ": out of memory, the kernel killed it: /sys/fs/cgroup may use 512 MiB (mem_limit, MemoryMax"
    )
    assert text.endswith("give the service more memory, or lower --kv-blocks, --max-context or --max-running")


def test_kill_without_a_limit_is_the_machines(tmp_path: Path) -> None:
    kills = MemoryKills(_machine(tmp_path))
    (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
    assert "no cgroup limits it, and the machine has 100 MiB left" in kills.explanation(-9)


@pytest.mark.parametrize("code", [0, 1, -15, -11, 9])
def test_other_exits_are_not_the_kernels(tmp_path: Path, code: int) -> None:
    kills = MemoryKills(_machine(tmp_path))
    (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
    assert kills.explanation(code) == ""


def test_old_kill_does_not_explain_a_kill_by_a_user(tmp_path: Path) -> None:
    kills = MemoryKills(_machine(tmp_path))
    assert kills.explanation(-9) == ""
    (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
    for _ in range(9):
        kills.observe()
        assert kills.explanation(-9), "the process may end some seconds after the kill"
    kills.observe()
    assert kills.explanation(-9) == ""
