"""CPU topology: cores, SMT siblings, NUMA nodes, and what affinity and cgroup limits leave of them. From Linux's /sys.

    Topology ---- compute_threads: how many threads compute by default
        |
        +-- divide() --> one EngineShare per engine process, which bind_process() applies there

Where /sys is missing, each CPU counts as a core, all on one node.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from model.cgroups import cpu_quotas

_SPARE_CORE_FROM = 8
"""From this many cores one may be left to the API process: an eighth of the engine's speed at most."""


class Core(NamedTuple):
    """A physical core."""

    cpus: tuple[int, ...]
    """Its logical CPUs (SMT siblings) that this process may use."""
    node: int = 0
    """NUMA node."""
    is_fast: bool = True
    """False for an efficiency core of a hybrid CPU."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores that this process may use; at least one."""

    cores: tuple[Core, ...]
    quota: float = math.inf
    """CPUs whose time the cgroup may use."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """The NUMA nodes that have usable cores."""
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def n_cpus(self) -> int:
        """Logical CPUs, within the quota.

        Rounds down: with a quota of 2.5 CPUs, spinning threads on 3 would exhaust it, and then all are throttled.
        """
        return max(1, int(min(self.quota, sum(len(core.cpus) for core in self.cores))))

    @property
    def compute_threads(self) -> int:
        """The default: one for each fast physical core, within the quota.

        From eight on, one core is left to the API process unless it finds a sibling, a slow core or quota to spare.
        """
        threads = min(self.n_cpus, sum(core.is_fast for core in self.cores))
        return threads - 1 if threads >= _SPARE_CORE_FROM and threads == self.n_cpus else threads

    def on(self, nodes: Collection[int]) -> Topology:
        """The part on these nodes, with the same quota."""
        return Topology(tuple(core for core in self.cores if core.node in nodes), self.quota)

    def __str__(self) -> str:
        cpus, slow = sum(len(core.cpus) for core in self.cores), sum(not core.is_fast for core in self.cores)
        facts = {
            f"{cpus} CPUs": cpus != len(self.cores),
            f"{slow} of them slow": slow > 0,
            f"{len(self.nodes)} NUMA nodes": len(self.nodes) > 1,
            f"a cgroup quota of {self.quota:g} CPUs": self.quota < cpus,
        }
        return ", ".join([f"{len(self.cores)} physical cores", *(text for text, is_shown in facts.items() if is_shown)])


def read_topology(root: Path = Path("/"), affinity: Collection[int] | None = None) -> Topology:
    """The topology of this machine.

    root: directory of proc and sys. affinity: the CPUs that may be used, by default as the scheduler reports them.
    """
    allowed = set(_affinity() if affinity is None else affinity)
    devices = root / "sys/devices"
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in (devices / "system/node").glob("node[0-9]*")
        for cpu in _cpus(folder / "cpulist")
    }
    fast = _cpus(devices / "cpu_core/cpus") & allowed or allowed  # Intel's hybrid CPUs list their performance cores
    cores, seen = list[Core](), set[int]()
    for cpu in sorted(allowed):
        if cpu not in seen:
            siblings = _cpus(devices / f"system/cpu/cpu{cpu}/topology/thread_siblings_list") | {cpu}
            seen |= siblings
            cores.append(Core(tuple(sorted(siblings & allowed)), node_of.get(cpu, 0), cpu in fast))
    return Topology(tuple(cores), min(cpu_quotas(root), default=math.inf))


def _affinity() -> Collection[int]:
    # macOS and Windows have no such call, and no cgroups.
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def _cpus(file: Path) -> set[int]:
    """The CPUs of a list such as 0-3,8; none if there is no such file."""
    cpus = set[int]()
    with suppress(OSError, ValueError):
        for part in filter(None, file.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


class EngineShare(NamedTuple):
    """The share of the machine that one engine process gets."""

    threads: int
    """Compute threads."""
    cpus: tuple[int, ...] = ()
    """The CPUs that it runs on; empty leaves that to the system."""


def divide(topology: Topology, engines: int, threads: int = 0) -> tuple[EngineShare, ...]:
    """Shares of `engines` engine processes, all with the same number of threads.

    With several engines on several nodes, each runs on its own node, or they share the nodes evenly.
    threads: of all engines together, as the user chose them; 0 chooses.
    """
    nodes = topology.nodes
    starts = [engine * len(nodes) // engines for engine in range(engines)] + [len(nodes)]
    groups = [nodes[start : max(end, start + 1)] for start, end in pairwise(starts)]
    parts = {group: topology.on(group) for group in groups}
    each = (threads or topology.compute_threads) // engines
    if not threads:
        each = min([each, *(part.compute_threads // groups.count(group) for group, part in parts.items())])
    each = max(1, each)
    room = min(sum(len(core.cpus) for core in part.cores) // groups.count(group) for group, part in parts.items())
    if room < each if threads else 2 * room <= topology.compute_threads // engines:
        # Affinity leaves a node too few CPUs: the system places the threads.
        parts, groups = {nodes: topology}, [nodes] * engines
        each = max(1, (threads or topology.compute_threads) // engines)
    return tuple(
        EngineShare(
            each,
            tuple(cpu for core in parts[group].cores for cpu in core.cpus) if len(parts) > 1 else (),
        )
        for group in groups
    )


def bind_process(cpus: Collection[int]) -> str:
    """Runs this process on `cpus`, if there are any, before it starts threads; returns what failed."""
    try:
        if cpus and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cpus)
    except OSError as error:
        return f"CPUs are not divided among engines ({error.strerror}): the engine may be slower"
    return ""
