"""Device memory: what is in use, what a step takes, and what a failed step releases.

The numbers come from torch.cuda, or from a fake in tests.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from model.nn.transformer import Decoder


class MemoryMeter(Protocol):
    """The part of torch.cuda that is asked here."""

    def mem_get_info(self, device: torch.device, /) -> tuple[int, int]:
        """Free bytes and total bytes."""
        ...

    def memory_allocated(self, device: torch.device, /) -> int:
        """Bytes of this process's tensors."""
        ...

    def max_memory_allocated(self, device: torch.device, /) -> int:
        """Most of them since the last reset."""
        ...

    def memory_reserved(self, device: torch.device, /) -> int:
        """Bytes that torch has taken from the device for tensors, with the gaps between them."""
        ...

    def max_memory_reserved(self, device: torch.device, /) -> int:
        """Most of them since the last reset."""
        ...

    def reset_peak_memory_stats(self, device: torch.device, /) -> None:
        """From here on the most is counted anew."""
        ...

    def empty_cache(self) -> None:
        """Gives back what torch keeps for later tensors."""
        ...

    def synchronize(self, device: torch.device, /) -> None:
        """Waits until all is computed; raises what went wrong meanwhile."""
        ...


class StepPeak(NamedTuple):
    """Of a GPU, in bytes."""

    total: int
    weights: int
    other: int
    """Taken, but not by the weights: CUDA's own part, loaded kernels, gaps, other processes."""


def weight_bytes(decoder: Decoder) -> int:
    """Of its parameters and tables."""
    return sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))


def taken(device: torch.device, meter: MemoryMeter = torch.cuda) -> StepPeak:
    """To be asked while the weights are all the tensors that there are."""
    gc.collect()
    meter.empty_cache()
    free, total = meter.mem_get_info(device)
    weights = meter.memory_allocated(device)
    return StepPeak(total, weights, max(0, total - free - weights))


def activation_peak(compute_once: Callable[[], object], device: torch.device, meter: MemoryMeter = torch.cuda) -> int:
    """Bytes of a GPU that `compute_once`, the largest step, takes beyond what is there.

    What it keeps for good (workspaces of libraries) is among them. So are the gaps between tensors, since the device
    lacks them all the same.
    """
    meter.empty_cache()
    allocated, reserved = meter.memory_allocated(device), meter.memory_reserved(device)
    meter.reset_peak_memory_stats(device)
    compute_once()
    meter.synchronize(device)
    peak = max(meter.max_memory_allocated(device) - allocated, meter.max_memory_reserved(device) - reserved)
    meter.empty_cache()
    return peak


def releaser(device: torch.device, meter: MemoryMeter = torch.cuda) -> Callable[[], None]:
    """What to call behind a step that failed, so that the next one finds the memory that it held.

    Where the device is lost this raises what CUDA says: whatever the step said, no further one can succeed.
    """

    def release() -> None:
        gc.collect()  # an error's frames may hang in a ring, and the step's tensors on them
        meter.synchronize(device)
        meter.empty_cache()

    return release if device.type == "cuda" else _nothing


def _nothing() -> None:
    pass
