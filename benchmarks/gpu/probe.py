"""Detects a GPU that this torch supports."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.results import Finding, StageContext, Unsupported

_LEAST = (8, 0)


def run(_bench: StageContext) -> Iterator[Finding]:
    """One finding: the name of the device."""
    if not torch.cuda.is_available():
        raise Unsupported(f"torch {torch.__version__} finds no CUDA GPU")
    if torch.cuda.get_device_capability() < _LEAST:
        raise Unsupported(f"{torch.cuda.get_device_name()} has a compute capability below 8.0")
    torch.ones(1, device="cuda").sum().item()
    yield Finding(what="device", value=torch.cuda.get_device_name())
