"""Which kernels are looked at on a device. Triton may be missing, so they are loaded by name."""

from __future__ import annotations

import os
from importlib import import_module

from app.engine.kernels.face import Kernels
from app.engine.kernels.twins import TorchKernels


def subject(device: str, **options: int) -> Kernels:
    """Triton's on a GPU, and on a CPU where its interpreter is asked for; else the twins. options: TritonKernels'."""
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return TorchKernels()
    kernels: Kernels = import_module("app.engine.kernels.triton_kernels").TritonKernels(**options)
    return kernels
