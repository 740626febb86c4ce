"""Time of device work: CUDA events on a GPU and the host clock elsewhere, and kernel times by torch's profiler."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.results import Finding

_MAX_KERNELS = 7
_LONGEST_NAME = 70


@dataclass(frozen=True, slots=True)
class DeviceTimer:
    """Timer of a device type."""

    device: str

    def median(self, work: Callable[[], object], *, repeats: int = 7, warm_up: int = 3) -> float:
        """Median seconds of one call, after a warm-up."""
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

    def synchronize(self) -> None:
        """Waits for the device, before the host clock is read."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def kernel_times(work: Callable[[], object], steps: int, device: str, what: str) -> Iterator[Finding]:
    """Kernel times of `work`, which is called once and runs `steps` steps: the total, then the slowest kernels.

    The profiler itself slows short kernels: read shares from here, and the time of a step from elsewhere.
    """
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    times = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count, event.key)
        for event in profiler.key_averages()
        if event.device_type.name == device.upper()
    ]
    total = sum(duration for duration, _, _ in times) or 1.0
    launches = sum(count for _, count, _ in times) / steps
    yield Finding(what=f"{what}: all kernels", value=total / steps, unit="us a step", note=f"{launches:g} launches")
    for duration, count, name in sorted(times, reverse=True)[:_MAX_KERNELS]:
        yield Finding(
            what=f"{what}: {name[:_LONGEST_NAME]}",
            value=duration / steps,
            unit="us a step",
            note=f"{100 * duration / total:.1f} % of all, {count / steps:g} launches",
        )
