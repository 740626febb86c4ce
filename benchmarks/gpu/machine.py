"""Facts about the machine: GPU, memory, clocks, driver, torch and Triton."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import torch

from benchmarks.gpu.packages import version_of
from benchmarks.gpu.results import Finding, StageContext
from model.device import describe

_SMI_FIELDS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def run(context: StageContext) -> Iterator[Finding]:
    """Reports facts; checks nothing."""
    yield Finding(what="device", value=describe(torch.device(context.device)))
    yield Finding(what="torch", value=str(torch.__version__), note=f"CUDA {torch.version.cuda}")
    yield Finding(what="triton", value=version_of("triton") or "none")
    yield Finding(what="transformers", value=version_of("transformers") or "none")
    if context.device != "cuda":
        return
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    yield Finding(what="memory", value=total / 2**30, unit="GiB", note=f"{free / 2**30:.1f} free")
    major, minor = torch.cuda.get_device_capability()
    yield Finding(what="multiprocessors", value=properties.multi_processor_count, note=f"sm_{major}{minor}")
    yield Finding(what="L2 cache", value=getattr(properties, "L2_cache_size", 0) / 2**20, unit="MiB")
    if smi := shutil.which("nvidia-smi"):
        command = [smi, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        yield Finding(what="nvidia-smi", value=done.stdout.strip() or "silent", note=_SMI_FIELDS)
