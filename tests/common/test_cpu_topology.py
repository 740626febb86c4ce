"""Cores, SMT siblings, NUMA nodes and quotas of made-up machines, and the CPUs and threads that each engine gets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from app.common.cpu_topology import EngineShare, Topology, bind_process, divide, read_topology

EIGHT = range(8)


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
def test_cgroup_v2_limits_the_cores(tmp_path: Path, limit: str, cores: int) -> None:
    """In a container with its own cgroup namespace, this process is at the root of the mounted hierarchy."""
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{limit}\n"}
    assert read_topology(_root(tmp_path, files), EIGHT).n_cpus == cores


def test_smallest_limit_up_to_the_root_applies(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a.slice/b.service\n",
        "sys/fs/cgroup/a.slice/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/a.slice/b.service/cpu.max": "max 100000\n",
        "sys/fs/cgroup/c.slice/cpu.max": "100000 100000\n",
    }
    assert read_topology(_root(tmp_path, files), EIGHT).n_cpus == 3


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3", "100000 0"])
def test_unreadable_files_set_no_limit(tmp_path: Path, text: str) -> None:
    assert read_topology(tmp_path, EIGHT).n_cpus == 8
    for cgroup in ("0::/\n", text):
        files = {"proc/self/cgroup": cgroup, "sys/fs/cgroup/cpu.max": text}
        assert read_topology(_root(tmp_path, files), EIGHT).n_cpus == 8


def test_limits_never_exceed_the_machine() -> None:
    assert 1 <= read_topology().compute_threads <= read_topology().n_cpus <= (os.cpu_count() or 1)


def _machine(
    folder: Path,
    *,
    cores: int,
    smt: int = 1,
    nodes: int = 1,
    quota: str = "max",
    cpus: Iterable[int] | None = None,
    files: Mapping[str, str] | None = None,
) -> Topology:
    """A machine that numbers its CPUs as Linux does on x86-64: first one per core, then their siblings."""
    tree = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    for core in range(cores):
        siblings = [core + cores * i for i in range(smt)]
        for cpu in siblings:
            path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            tree[path] = ",".join(map(str, siblings)) + "\n"
    for node in range(nodes):
        first, last = cores * node // nodes, cores * (node + 1) // nodes - 1
        ranges = [f"{first + cores * i}-{last + cores * i}" for i in range(smt)]
        tree[f"sys/devices/system/node/node{node}/cpulist"] = ",".join(ranges) + "\n"
    return read_topology(_root(folder, tree | dict(files or {})), range(cores * smt) if cpus is None else [*cpus])


def test_smt_siblings_share_one_thread(tmp_path: Path) -> None:
    topology = _machine(tmp_path, cores=4, smt=2)
    assert [core.cpus for core in topology.cores] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert (topology.compute_threads, topology.n_cpus, topology.nodes) == (4, 8, (0,))
    assert divide(topology, 1) == (EngineShare(4),)
    assert str(topology) == "4 physical cores, 8 CPUs"


@pytest.mark.parametrize(
    ("machine", "threads"),
    [
        ({"cores": 1}, 1),
        ({"cores": 2}, 2),
        ({"cores": 7}, 7),
        ({"cores": 8}, 7),  # one for the API process, because there are no siblings
        ({"cores": 8, "smt": 2}, 8),
        ({"cores": 8, "smt": 2, "quota": "800000"}, 7),
        ({"cores": 8, "smt": 2, "quota": "950000"}, 8),
        ({"cores": 8, "smt": 2, "quota": "150000"}, 1),
        ({"cores": 4, "smt": 2, "cpus": (0, 4)}, 1),  # both siblings of one core
        ({"cores": 4, "smt": 2, "cpus": (3, 6)}, 2),
        ({"cores": 64, "nodes": 2, "cpus": range(32, 64)}, 31),
    ],
)
def test_threads_compute_on_physical_cores(tmp_path: Path, machine: dict[str, Any], threads: int) -> None:
    assert _machine(tmp_path, **machine).compute_threads == threads


def test_efficiency_cores_do_not_compute_by_default(tmp_path: Path) -> None:
    intel = {"sys/devices/cpu_core/cpus": "0-3\n", "sys/devices/cpu_atom/cpus": "4-7\n"}
    topology = _machine(tmp_path, cores=8, files=intel)
    assert topology.compute_threads == 4 and divide(topology, 1) == (EngineShare(4),)
    assert str(topology) == "8 physical cores, 4 of them slow"
    only_slow = _machine(tmp_path / "slow", cores=8, files=intel, cpus=range(4, 8))
    assert only_slow.compute_threads == 4


def test_without_sys_each_cpu_is_a_core(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, (0, 1, 2))
    assert (topology.compute_threads, topology.nodes, divide(topology, 1)) == (3, (0,), (EngineShare(3),))


def test_single_core_has_one_layout(tmp_path: Path) -> None:
    assert divide(_machine(tmp_path, cores=1), 2) == (EngineShare(1),) * 2


def test_engines_on_a_single_node_are_not_bound(tmp_path: Path) -> None:
    topology = _machine(tmp_path, cores=8, smt=2)
    assert divide(topology, 2) == (EngineShare(4),) * 2
    assert divide(topology, 2, threads=5) == (EngineShare(2),) * 2
    assert divide(topology, 64)[0].threads == 1


def test_single_engine_uses_all_nodes(tmp_path: Path) -> None:
    topology = _machine(tmp_path, cores=8, smt=2, nodes=2)
    assert divide(topology, 1) == (EngineShare(8),)
    assert str(topology) == "8 physical cores, 16 CPUs, 2 NUMA nodes"
    one_node = _machine(tmp_path / "bound", cores=8, smt=2, nodes=2, cpus=(4, 5, 6, 7))  # numactl --cpunodebind=1
    assert one_node.nodes == (1,) and divide(one_node, 1) == (EngineShare(4),)


def test_each_engine_gets_a_node(tmp_path: Path) -> None:
    topology = _machine(tmp_path, cores=8, smt=2, nodes=2)
    first, second = divide(topology, 2)
    assert first == EngineShare(4, cpus=(0, 8, 1, 9, 2, 10, 3, 11))
    assert second == EngineShare(4, cpus=(4, 12, 5, 13, 6, 14, 7, 15))
    three = divide(topology, 3)  # two of them share a node, and all have the same number of threads
    assert [share.cpus for share in three] == [first.cpus, first.cpus, second.cpus]
    assert {share.threads for share in three} == {2}


def test_few_engines_share_many_nodes_evenly(tmp_path: Path) -> None:
    topology = _machine(tmp_path, cores=16, nodes=4)
    shares = divide(topology, 2)
    assert [share.cpus for share in shares] == [tuple(range(8)), tuple(range(8, 16))]
    assert {share.threads for share in shares} == {7}


def test_no_placement_exceeds_cores_quota_or_nodes(tmp_path: Path) -> None:
    numbers = count()
    for nodes in (1, 2, 4):
        for quota in ("max", "300000", "1250000"):
            topology = _machine(tmp_path / str(next(numbers)), cores=16, smt=2, nodes=nodes, quota=quota)
            for engines in (1, 2, 3, 4, 5, 16):
                shares = divide(topology, engines)
                assert len(shares) == engines and len({share.threads for share in shares}) == 1
                assert sum(share.threads for share in shares) <= max(topology.n_cpus, engines)
                if engines >= nodes > 1:
                    assert {node for share in shares for node in topology.nodes if _runs_on(share, topology, node)} == {
                        *topology.nodes
                    }


def _runs_on(share: EngineShare, topology: Topology, node: int) -> bool:
    return any(cpu in share.cpus for core in topology.on([node]).cores for cpu in core.cpus)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_process_is_bound_to_cpus_and_failures_are_reported() -> None:
    before = os.sched_getaffinity(0)
    try:
        assert not bind_process([]) and not bind_process([min(before)])
        assert os.sched_getaffinity(0) == {min(before)}
        assert bind_process([1 << 12]).startswith("CPUs are not divided among engines (")
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("threads", "each"), [(0, 15), (16, 8)])
def test_node_with_hardly_any_allowed_cpu_gets_no_engine(tmp_path: Path, threads: int, each: int) -> None:
    cpus = [*range(30), 32, 33]
    shares = divide(_machine(tmp_path, cores=64, nodes=2, cpus=cpus), 2, threads)
    assert {(share.threads, share.cpus) for share in shares} == {(each, ())}
    even = divide(_machine(tmp_path, cores=64, nodes=2), 2, threads)
    assert [len(share.cpus) for share in even] == [32, 32]
