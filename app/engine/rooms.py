"""How many blocks the cache gets on a CPU and on a GPU, with the plan of the memory that led to it. Knows no pipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from app.engine.device_memory import Meter, activation_peak, taken, weight_bytes
from app.engine.memory import CacheRoom, free_memory
from app.engine.memory_plan import MemoryPlan, Row, host_rows, mib
from model.transformer import Decoder


class Blocks(NamedTuple):
    """What the cache gets."""

    number: int
    rows: tuple[Row, ...]
    """Where the memory goes, for the log."""


def blocks_on_cpu(room: CacheRoom, decoder: Decoder, *, wanted: int, engines: int) -> Blocks:
    """Within half of what is free, which `engines` share. Raises ValueError."""
    free = free_memory()
    number = room.blocks(wanted, free, engines)
    return Blocks(number, host_rows(free=free, weights=weight_bytes(decoder), cache=room.cache_bytes(number)))


def blocks_on_gpu(
    room: CacheRoom,
    decoder: Decoder,
    device: torch.device,
    *,
    wanted: int,
    utilization: float,
    activations: int,
    graphs: int = 0,
    meter: Meter = torch.cuda,
) -> Blocks:
    """All that is left of the service's share, or as many as are wanted. Raises ValueError.

    To be asked when the decoder's tensors are all that there are: what was measured with is gone. `activations`: see
    step_peak(); `graphs`: bytes that captured steps will keep.
    """
    weights = weight_bytes(decoder)
    total, other = taken(device, weights, meter)
    plan = MemoryPlan(
        total=total, utilization=utilization, weights=weights, activations=activations, graphs=graphs, other=other
    )
    number = room.blocks_on_gpu(wanted, plan)
    return Blocks(number, replace(plan, cache=room.cache_bytes(number)).rows)


def step_peak(compute_once: Callable[[], object], device: torch.device, meter: Meter = torch.cuda) -> int:
    """Bytes that the largest step takes (largest_step.py), on a GPU. Raises ValueError where there are not so many."""
    try:
        return activation_peak(compute_once, device, meter) or 0
    except torch.OutOfMemoryError:
        free = meter.mem_get_info(device)[0]
    raise ValueError(
        f"the largest step takes more memory than the {mib(free)} beside the weights: give a smaller "
        "--tokens-per-step, --max-running or --max-context"
    )
