"""Triton's kernels for a step, where they are installed. Knows no network.

Triton is an extra, so this is the one file that asks for it; app/engine/kernels/rounded.py does the same for products.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import NamedTuple

from app.engine.kernels.face import Kernels


class Found(NamedTuple):
    """Kernels, and what receipts call them."""

    kernels: Kernels
    numerics: str


def triton_kernels() -> Found | None:
    """None where Triton is not installed."""
    if find_spec("triton") is None:
        return None
    return Found(import_module("app.engine.kernels.triton_kernels").TritonKernels(), f"triton-{version('triton')}")
