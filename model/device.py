"""Selects the device and the number format, for training and for the engine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from model import machine


def choose_device(name: str) -> torch.device:
    """auto | cpu | cuda -> an available device. Raises ValueError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device is available; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto | float32 | bfloat16; auto means bfloat16 if the device supports it natively."""
    if name == "auto":
        return torch.bfloat16 if _has_native_bfloat16(device) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


_ROW_INVARIANT = {"MKL_CBWR": "AUTO,STRICT", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
"""Settings of torch's CPU libraries with which the bits of a product's row do not depend on the number of rows.

On an Intel CPU (torch 2.13, AVX-512 with AMX), MKL adds float32 products of up to 13 rows, or with two threads, in
another order than with more rows, but not in its strict reproducible mode. oneDNN's bfloat16 products on AMX tiles
differ with 768 and more columns; on vectors they do not. See "Numerical Reproducibility" in oneMKL's developer guide.
"""


def use_row_invariant_products(cpu_info: Path = Path("/proc/cpuinfo")) -> None:
    """Makes torch's products batch-invariant on Intel CPUs; elsewhere they are. Call it before the first product.

    Keeps what the environment says already. Training does without: it needs the AMX tiles more than equal bits.
    """
    if any(line.split(":")[-1].strip() == "GenuineIntel" for line in machine.lines(cpu_info) if "vendor_id" in line):
        for name, value in _ROW_INVARIANT.items():
            os.environ.setdefault(name, value)


def free_memory(device: torch.device) -> int:
    """Free memory of the device in bytes; for a CPU, the machine's or the container's, whichever is less."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else machine.free_memory()


def describe(device: torch.device) -> str:
    """Human-readable name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return machine.describe_cpu(torch.get_num_threads())


def _has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return machine.has_native_bfloat16()
