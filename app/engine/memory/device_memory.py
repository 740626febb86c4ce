"""Device memory: what is in use, what a step needs, and what a failed step releases.

The numbers come from torch.cuda, or from a fake in tests.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from model.nn.transformer import Decoder

MemoryMeter = Any
"""The functions of torch.cuda that measure and free memory, or a fake."""


class MemoryUsage(NamedTuple):
    """Memory of a GPU in bytes."""

    total: int
    weights: int
    other: int
    """In use, but not by the weights: CUDA itself, loaded kernels, gaps, other processes."""


def weight_bytes(decoder: Decoder) -> int:
    """Bytes of the decoder's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))


def memory_usage(device: torch.device, meter: MemoryMeter = torch.cuda) -> MemoryUsage:
    """Measures the memory in use; to be called while the weights are the only tensors."""
    gc.collect()
    meter.empty_cache()
    free, total = meter.mem_get_info(device)
    weights = meter.memory_allocated(device)
    return MemoryUsage(total, weights, max(0, total - free - weights))


def activation_peak(compute_once: Callable[[], object], device: torch.device, meter: MemoryMeter = torch.cuda) -> int:
    """Bytes of a GPU that `compute_once`, the largest step, needs in addition to the memory in use.

    They include memory that it keeps permanently (workspaces of libraries), and the gaps between tensors, which are
    unavailable to others all the same.
    """
    meter.empty_cache()
    allocated, reserved = meter.memory_allocated(device), meter.memory_reserved(device)
    meter.reset_peak_memory_stats(device)
    compute_once()
    meter.synchronize(device)
    peak: int = max(meter.max_memory_allocated(device) - allocated, meter.max_memory_reserved(device) - reserved)
    meter.empty_cache()
    return peak


def memory_releaser(device: torch.device, meter: MemoryMeter = torch.cuda) -> Callable[[], None]:
    """Returns a function that frees the memory which a failed step held, so that the next step can use it.

    If the device is lost, the function raises CUDA's error: no further step can succeed, whatever the last one raised.
    """

    def release() -> None:
        gc.collect()  # reference cycles may keep an error's frames alive, and these the step's tensors
        meter.synchronize(device)
        meter.empty_cache()

    return release if device.type == "cuda" else _do_nothing


def _do_nothing() -> None:
    pass
