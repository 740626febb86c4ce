"""Plans an engine's memory: the size of the KV cache on CPU and GPU, and the table for the log.

total
+-- share (--gpu-memory-utilization) ------------------------------+-- left free --+
| weights | activations of the largest step | graphs | cache       |               |
+-- less where other processes, and CUDA itself, hold more than what is left free -+
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from app.engine.memory.device_errors import lacked_device_memory
from app.engine.memory.device_memory import MemoryMeter, activation_peak, taken, weight_bytes
from app.engine.memory.encoder_cache import source_tokens
from model.config import ModelConfig
from model.device import free_memory
from model.nn.transformer import Decoder

_SPARE_SHARE = 64
"""A 64th of the memory stays free: kernels are loaded on first use, and torch's allocator fragments."""


class PlanRow(NamedTuple):
    """A line of the table."""

    what: str
    size: int | None
    """Bytes; None: not measured."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes of one GPU."""

    total: int
    utilization: float
    """Share of all memory that the service may take, 0 to 1."""
    weights: int
    activations: int
    """Most that a step takes for itself, measured."""
    graphs: int = 0
    """Kept for captured steps."""
    other: int = 0
    """CUDA's own part and other processes."""
    cache: int = 0
    """Taken for keys and values in the end."""

    @property
    def share(self) -> int:
        """What the service may take."""
        return int(self.total * self.utilization)

    @property
    def limit(self) -> int:
        """What it can take: others may hold a part of its share."""
        return max(0, min(self.share, self.total - self.other - self.total // _SPARE_SHARE))

    @property
    def needed(self) -> int:
        """What it takes before the cache."""
        return self.weights + self.activations + self.graphs

    @property
    def cache_room(self) -> int:
        """What is left for the cache."""
        return max(0, self.limit - self.needed)

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The plan as people read it."""
        return (
            PlanRow("GPU memory", self.total),
            PlanRow("CUDA, other processes", self.other),
            PlanRow("may be taken", self.limit, f"--gpu-memory-utilization {self.utilization:g}"),
            PlanRow("weights", self.weights),
            PlanRow("activations", self.activations, "measured at the largest step"),
            PlanRow("graphs", self.graphs, "kept for captured steps"),
            PlanRow("cache", self.cache),
            PlanRow("not taken", self.limit - self.needed - self.cache),
        )

    def refusal(self) -> str:
        """Error text for a cache that does not fit: what is left, and why."""
        taken = f"{mib(self.weights)} of weights, {mib(self.activations)} of activations, {mib(self.graphs)} of graphs"
        held = f"; {mib(self.other)} are taken by others" if self.limit < self.share else ""
        source = f"--gpu-memory-utilization {self.utilization:g} of {mib(self.total)}{held}"
        return f"{mib(self.cache_room)} are left of {mib(self.limit)} ({source}) after {taken}"

    def utilization_for(self, cache: int) -> float | None:
        """The least --gpu-memory-utilization, in hundredths, that has room for such a cache; None: none has."""
        for hundredths in range(1, 101):
            if replace(self, utilization=hundredths / 100).cache_room >= max(1, cache):
                return hundredths / 100
        return None


def host_rows(*, free: int, weights: int, cache: int) -> tuple[PlanRow, ...]:
    """The plan of a CPU: what is known before the first step."""
    return (
        PlanRow("free memory", free),
        PlanRow("weights", weights, "loaded already"),
        PlanRow("activations", None),
        PlanRow("cache", cache, "at most half of the free memory"),
    )


def table(rows: Sequence[PlanRow]) -> list[str]:
    """One line for each row, in columns."""
    names, sizes = max(len(row.what) for row in rows), [mib(row.size) for row in rows]
    width = max(map(len, sizes))
    notes = [f" ({row.note})" if row.note else "" for row in rows]
    return [f"{row.what:<{names}}  {size:>{width}}{note}" for row, size, note in zip(rows, sizes, notes, strict=True)]


def mib(size: int | None) -> str:
    """Bytes for people, whole MiB; a GPU has ten thousands of them."""
    return "not measured" if size is None else f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size >> 10} KiB"


_SHARE = 0.5
_MOST_BLOCKS = 1 << 20
"""Of a GPU's cache, which takes all that is left: each block costs the scheduler memory of the host, too."""


def choose_context(shape: ModelConfig, wanted: int) -> int:
    """Tokens that a sequence may have; 0 takes the model's own. Raises ValueError."""
    if wanted > shape.context:
        raise ValueError(f"--max-context {wanted} is more than the model's context of {shape.context}")
    return wanted or shape.context


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What the caches of a service need."""

    shape: ModelConfig
    context: int
    block_size: int
    max_running: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the KV cache."""
        return self._token_bytes * self.block_size

    @property
    def source_bytes(self) -> int:
        """Bytes of what the encoder read for all running requests."""
        return self._token_bytes * source_tokens(self.context) * self.max_running if self.shape.n_encoder_layers else 0

    @property
    def needed_blocks(self) -> int:
        """Of one sequence as long as may be."""
        return -(-self.context // self.block_size)

    def cache_bytes(self, blocks: int) -> int:
        """Bytes of a cache with so many blocks, including the padding block and the encoder cache."""
        return (blocks + 1) * self.block_bytes + self.source_bytes

    def blocks(self, wanted: int, free_bytes: int, engines: int = 1) -> int:
        """As many blocks as are wanted (0: as all running requests can fill) within a share of the free memory.

        `engines` take theirs from it at the same time. Raises ValueError.
        """
        needed = self.needed_blocks
        affordable = max(0, int(free_bytes * _SHARE) // engines - self.source_bytes) // self.block_bytes
        share = "half of the free memory"
        if engines > 1:
            share = f"each engine's part of {share} (--replicas {engines})"
        if affordable < needed:
            least_bytes = needed * self.block_bytes + self.source_bytes
            flags = ["--max-context", *["--max-running"] * bool(self.source_bytes), *["--replicas"] * (engines > 1)]
            raise ValueError(
                f"a sequence of {self.context} tokens needs {least_bytes >> 20} MiB of cache, more than {share} holds: "
                f"give a smaller {' or '.join(flags)}, or free some"
            )
        if not wanted:
            return min(needed * self.max_running, affordable)
        if not needed <= wanted <= affordable:
            raise ValueError(
                f"--kv-blocks {wanted} does not fit: the context of {self.context} tokens needs at least "
                f"{needed} blocks, and {share} holds {affordable}"
            )
        return wanted

    def blocks_on_gpu(self, wanted: int, plan: MemoryPlan) -> int:
        """As many blocks as are wanted (0: all that the plan has room for). Raises ValueError."""
        affordable = max(0, (plan.cache_room - self.source_bytes) // self.block_bytes - 1)
        needed = self.needed_blocks
        if affordable < needed:
            raise ValueError(
                f"a sequence of {self.context} tokens needs {mib(self.cache_bytes(needed))} of cache, and "
                f"{plan.refusal()}: {self._advice(affordable, plan)}"
            )
        if not wanted:
            return min(affordable, _MOST_BLOCKS)
        if wanted < needed:
            raise ValueError(
                f"--kv-blocks {wanted} is too few: the context of {self.context} tokens needs {needed} blocks of "
                f"{self.block_size} (or a smaller --max-context)"
            )
        if wanted > affordable:
            raise ValueError(
                f"--kv-blocks {wanted} does not fit: these blocks need {mib(self.cache_bytes(wanted))} of cache, and "
                f"{plan.refusal()}: give at most {affordable}"
            )
        return wanted

    def _advice(self, affordable: int, plan: MemoryPlan) -> str:
        """The numbers that help where not even one sequence fits."""
        flags = []
        if self.source_bytes:  # the sources of all running requests need room, too
            flags.append("a smaller --max-context or --max-running")
        elif affordable:
            flags.append(f"--max-context {affordable * self.block_size} or less")
        if utilization := plan.utilization_for(self.cache_bytes(self.needed_blocks)):
            flags.append(f"--gpu-memory-utilization {utilization:g} or more")
        return f"give {', or '.join(flags)}" if flags else "take a smaller model, or end what else uses the GPU"

    @property
    def _token_bytes(self) -> int:
        return self.shape.kv_numbers_per_token * self.dtype.itemsize


class MemoryPeaks(NamedTuple):
    """Bytes that steps take in addition to weights and cache."""

    activations: int = 0
    graphs: int = 0
    """What captured steps keep."""


class BlockBudget(NamedTuple):
    """What the cache gets."""

    number: int
    rows: tuple[PlanRow, ...]
    """Where the memory goes, for the log."""


def blocks_on_cpu(room: CacheShape, decoder: Decoder, *, wanted: int, engines: int) -> BlockBudget:
    """Within half of what is free, which `engines` share. Raises ValueError."""
    free = free_memory(torch.device("cpu"))
    number = room.blocks(wanted, free, engines)
    return BlockBudget(number, host_rows(free=free, weights=weight_bytes(decoder), cache=room.cache_bytes(number)))


def blocks_on_gpu(
    room: CacheShape,
    device: torch.device,
    *,
    wanted: int,
    utilization: float,
    peaks: MemoryPeaks,
    meter: MemoryMeter = torch.cuda,
) -> BlockBudget:
    """All that is left of the service's share, or as many as are wanted. Raises ValueError.

    To be asked when the weights are all the tensors that there are: what was measured with is gone.
    """
    total, weights, other = taken(device, meter)
    plan = MemoryPlan(
        total=total,
        utilization=utilization,
        weights=weights,
        activations=peaks.activations,
        graphs=peaks.graphs,
        other=other,
    )
    number = room.blocks_on_gpu(wanted, plan)
    return BlockBudget(number, replace(plan, cache=room.cache_bytes(number)).rows)


def step_peak(compute_once: Callable[[], object], device: torch.device, meter: MemoryMeter = torch.cuda) -> int:
    """Bytes that the largest step (execution/warmup_batches.py) takes on a GPU. Raises ValueError if too few."""
    try:
        return activation_peak(compute_once, device, meter)
    except Exception as error:
        if not lacked_device_memory(error):
            raise
        free = meter.mem_get_info(device)[0]
    raise ValueError(
        f"the largest step takes more memory than the {mib(free)} beside the weights: give a smaller "
        "--tokens-per-step, --max-running or --max-context"
    )
