"""Detects a GPU that this torch can compute on, and its name."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.finding import Bench, Finding, Unsupported

_LEAST = (8, 0)


def run(_bench: Bench) -> Iterator[Finding]:
    """One finding: its name."""
    if not torch.cuda.is_available():
        raise Unsupported(f"torch {torch.__version__} finds no CUDA GPU")
    if torch.cuda.get_device_capability() < _LEAST:
        raise Unsupported(f"{torch.cuda.get_device_name()} is too old")
    torch.ones(1, device="cuda").sum().item()
    yield Finding(what="device", value=torch.cuda.get_device_name())
