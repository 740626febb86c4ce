"""Selects the device and the number format, for training and for the engine."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


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


def free_memory(device: torch.device) -> int:
    """Free memory of the device in bytes; for a CPU, that of the machine or of the container, whichever is less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    fields = dict(line.split(":", 1) for line in _lines("/proc/meminfo"))
    if "MemAvailable" not in fields:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = 1024 * int(fields["MemAvailable"].split()[0])
    limits = [int(line) for line in _lines("/sys/fs/cgroup/memory.max") if line.isdigit()]
    return min([available, *limits])


def describe(device: torch.device) -> str:
    """Human-readable name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    names = (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    name = next(names, platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _has_native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
