"""Selects the kernels under test on a device. Triton may be missing, so they are loaded by name."""

from __future__ import annotations

from importlib import import_module

from app.engine.gpu.kernels.interface import Kernels
from app.engine.gpu.kernels.reference_operations import ReferenceKernels


def subject(device: str, **options: int) -> Kernels:
    """The reference kernels on a CPU, to test the checks themselves; else the device's kernels."""
    return ReferenceKernels() if device == "cpu" else triton_kernels(**options)


def triton_kernels(**options: int) -> Kernels:
    """options: those of TritonKernels. Raises ImportError where there is no Triton."""
    kernels: Kernels = import_module("app.engine.gpu.kernels.triton.operations").TritonKernels(**options)
    return kernels
