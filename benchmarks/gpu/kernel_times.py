"""Kernel times of a step by torch's profiler, to find what to optimize next.

Where a kernel is short, the profiler itself costs: shares are to be read from here, and the step's time from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.finding import Finding

_MOST = 7
_LONGEST_NAME = 70


def kernel_times(work: Callable[[], object], steps: int, device: str, what: str) -> Iterator[Finding]:
    """Of `work`, which is called once and runs so many steps: all together, then those that take longest."""
    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    times = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count, event.key)
        for event in seen.key_averages()
        if event.device_type.name == device.upper()
    ]
    total = sum(time for time, _, _ in times) or 1.0
    launches = sum(count for _, count, _ in times) / steps
    yield Finding(what=f"{what}: all kernels", value=total / steps, unit="us a step", note=f"{launches:g} launches")
    for time, count, name in sorted(times, reverse=True)[:_MOST]:
        yield Finding(
            what=f"{what}: {name[:_LONGEST_NAME]}",
            value=time / steps,
            unit="us a step",
            note=f"{100 * time / total:.1f} % of all, {count / steps:g} launches",
        )
