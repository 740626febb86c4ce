"""Facts about the machine, its measured peaks, and the least time of a decoder's step by them (roofline model)."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.packages import version_of
from benchmarks.gpu.results import Finding, StageContext, Unsupported
from model.config import ModelConfig
from model.decoder_program import Kind, cost, decoder_program
from model.device import describe

_LEAST_CAPABILITY = (8, 0)
_SMI_FIELDS = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"


def probe(_context: StageContext) -> Iterator[Finding]:
    """One finding: the name of a GPU that this torch supports."""
    if not torch.cuda.is_available():
        raise Unsupported(f"torch {torch.__version__} finds no CUDA GPU")
    if torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        raise Unsupported(f"{torch.cuda.get_device_name()} has a compute capability below 8.0")
    torch.ones(1, device="cuda").sum().item()
    yield Finding(what="device", value=torch.cuda.get_device_name())


def machine(context: StageContext) -> Iterator[Finding]:
    """GPU, memory, clocks, driver, torch and Triton; checks nothing."""
    yield Finding(what="device", value=describe(torch.device(context.device)))
    yield Finding(what="torch", value=str(torch.__version__), note=f"CUDA {torch.version.cuda}")
    yield Finding(what="triton", value=version_of("triton") or "none")
    if context.device != "cuda":
        return
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    yield Finding(what="memory", value=total / 2**30, unit="GiB", note=f"{free / 2**30:.1f} free")
    major, minor = torch.cuda.get_device_capability()
    yield Finding(what="capability", value=10 * major + minor)
    yield Finding(what="multiprocessors", value=properties.multi_processor_count)
    shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)
    yield Finding(what="shared memory", value=shared_bytes / 1024, unit="KiB a program")
    yield Finding(what="L2 cache", value=getattr(properties, "L2_cache_size", 0) / 2**20, unit="MiB")
    if smi := shutil.which("nvidia-smi"):
        command = [smi, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        yield Finding(what="nvidia-smi", value=done.stdout.strip() or "silent", note=_SMI_FIELDS)


def roofs(context: StageContext) -> Iterator[Finding]:
    """Bandwidth in bytes per second, products in operations per second.

    Measures on random numbers, since zeros draw less power and come out faster than a model's numbers, and on 4 GiB of
    them (unless tiny), far more than any cache holds.
    """
    x_N = torch.empty(1 << 16 if context.tiny else 1 << 31, dtype=torch.bfloat16, device=context.device).normal_()
    y_N, words_N, size = torch.empty_like(x_N), x_N.view(torch.int32), 2.0 * len(x_N)
    copied = 2 * size / _median_seconds(context.device, lambda: y_N.copy_(x_N))
    read = size / _median_seconds(context.device, words_N.max)
    rates = {"copy": (copied, "read + written"), "read": (read, "largest of int32")}
    for what, (rate, note) in (rates | {"most": (max(copied, read), "the roof of whatever reads")}).items():
        yield Finding(what=f"{what} bytes/s", value=rate, note=f"{rate / 1e9:,.0f} GB/s, {note}")
    side = 64 if context.tiny else 8192
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        # Three pairs in turn, so that none is still in a cache.
        pairs = [[torch.empty(side, side, device=context.device, dtype=dtype).normal_() for _ in "ab"] for _ in "123"]
        seconds = _median_seconds(context.device, partial(_multiply, pairs))
        rate = 2.0 * side**3 * len(pairs) / seconds
        yield Finding(what=f"{name} operations/s", value=rate, note=f"{rate / 1e12:,.1f} TFLOP/s, {side} x {side}")


def _multiply(pairs: list[list[torch.Tensor]]) -> None:
    for a_NN, b_NN in pairs:
        torch.mm(a_NN, b_NN)


def _median_seconds(device: str, work: Callable[[], object]) -> float:
    """Median of seven calls, after three that warm up."""
    seconds = []
    for _ in range(3 + 7):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[3:])


def synchronize(device: str) -> None:
    """Waits for the device, before the host clock is read."""
    if device == "cuda":
        torch.cuda.synchronize()


def least_seconds(
    context: StageContext, config: ModelConfig, *, tokens: float, rows: int, kept: float, weight_bytes: float = 2
) -> float | None:
    """Least time of a step that computes `tokens` tokens and samples for `rows` sequences of `kept` tokens each.

    The step reads all matrices once, and the keys and values, which are bfloat16. Operations leave out the products
    of attention, which are few compared with those of the matrices at the lengths measured here. None if the roofs are
    unknown.

    Args:
        weight_bytes: of a number in a matrix; products of quantized numbers are computed in bfloat16, too.
    """
    bytes_per_second, operations_per_second = context.roof("most bytes/s"), context.roof("bf16 operations/s")
    if not bytes_per_second or not operations_per_second:
        return None
    bytes_read = operations = 0.0
    for operation in decoder_program(config):
        each = cost(config, operation, kept)
        bytes_read += rows * each.cached * 2
        if operation.kind in (Kind.LINEAR, Kind.HEAD):
            bytes_read += each.flops / 2 * weight_bytes
            operations += each.flops * (rows if operation.kind == Kind.HEAD else tokens)
    return max(bytes_read / bytes_per_second, operations / operations_per_second)
