"""Triton's kernels for a step, where they are installed. Knows no network.

Triton is an extra, so this is the one file that asks for it; app/engine/kernels/rounded.py does the same for products.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from app.engine.kernels.face import Kernels
from app.engine.kernels.tiling import SHARED_BYTES


class Found(NamedTuple):
    """Kernels, and what receipts call them."""

    kernels: Kernels
    numerics: str


def triton_kernels(shared_bytes: int = SHARED_BYTES) -> Found | None:
    """None where Triton is not installed. shared_bytes: what a program may have of a multiprocessor's memory."""
    if find_spec("triton") is None:
        return None
    # Some builds of torch bring it under another package's name: only the module itself knows its version.
    version = import_module("triton").__version__
    kernels = import_module("app.engine.kernels.triton_kernels").TritonKernels(shared_bytes=shared_bytes)
    return Found(kernels, f"triton-{version}")
