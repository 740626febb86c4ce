"""Which kernels compute a step on a device: Triton's where it is installed, else torch's operations. Knows no network.

Triton is an extra, so this is the one file that asks for it; app/engine/kernels/rounded.py does the same for products.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

import torch

from app.engine.kernels.face import Kernels
from app.engine.kernels.twins import TorchKernels


class Found(NamedTuple):
    """Kernels, and what receipts call them."""

    kernels: Kernels
    numerics: str
    reason: str
    """For the log."""


def step_kernels(device: torch.device) -> Found:
    """The fastest that can be had on `device`."""
    if device.type != "cuda":
        return Found(TorchKernels(), "torch", "only a GPU has Triton's kernels")
    if find_spec("triton") is None:
        return Found(TorchKernels(), "torch", 'Triton is not installed, and is faster: pip install "inkstream[gpu]"')
    kernels: Kernels = import_module("app.engine.kernels.triton_kernels").TritonKernels()
    return Found(kernels, f"triton-{version('triton')}", "a GPU, and Triton is there")
