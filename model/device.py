"""Which device and which number format a machine should use. Used by training and by the engine's runner."""

from __future__ import annotations

import platform
from pathlib import Path

import torch


def choose_device(name: str) -> torch.device:
    """auto | cpu | cuda -> a device that is there. Raises ValueError."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device is available; use --device cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto | float32 | bfloat16; auto is bfloat16 where the device computes in it natively."""
    if name == "auto":
        return torch.bfloat16 if _native_bfloat16(device) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def describe(device: torch.device) -> str:
    """The device's name for people."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{name}, {torch.get_num_threads()} threads"


def _native_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
