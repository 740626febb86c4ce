"""Timers of work on a device: CUDA events on a GPU, the host's clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Clock:
    """For a device by its type."""

    device: str

    def median(self, work: Callable[[], object], *, repeats: int = 7, warm_up: int = 3) -> float:
        """Seconds of one call: the median, after calls that are not counted."""
        for _ in range(warm_up):
            work()
        return statistics.median(self.seconds(work) for _ in range(repeats))

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call."""
        if self.device != "cuda":
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000

    def settle(self) -> None:
        """Waits for the device, before the host's clock is read."""
        if self.device == "cuda":
            torch.cuda.synchronize()
