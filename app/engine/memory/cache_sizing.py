"""How many blocks the cache gets on a CPU and on a GPU, with the plan of the memory that led to it. Knows no pipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from app.engine.memory.device_errors import lacked_device_memory
from app.engine.memory.device_memory import MemoryMeter, activation_peak, taken, weight_bytes
from app.engine.memory.kv_budget import CacheShape
from app.engine.memory.memory_plan import MemoryPlan, PlanRow, host_rows, mib
from model.device import free_memory
from model.nn.transformer import Decoder


class MemoryPeaks(NamedTuple):
    """Bytes that steps take beside weights and cache."""

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
