"""Loads the Triton kernels, or the fallback if Triton is not installed.

Triton is an optional dependency, and only this file checks for it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch

from app.engine.gpu.kernels.interface import SHARED_BYTES, Kernels
from app.engine.gpu.kernels.reference_operations import Fp8Rows, Int8Product, dequantised_product, round_rows

_MOST_CHARACTERS = 200


class LoadedKernels(NamedTuple):
    """Kernels, and what receipts call them."""

    kernels: Kernels
    numerics: str


@dataclass(frozen=True, slots=True)
class RoundedKernels:
    """Kernels for products of quantized matrices. The defaults are torch's reference versions, for any device."""

    int8_product: Int8Product = dequantised_product
    fp8_rows: Fp8Rows = round_rows


TWINS = RoundedKernels()


def triton_kernels(shared_bytes: int = SHARED_BYTES) -> LoadedKernels | None:
    """None where Triton is not installed. shared_bytes: what a program may have of a multiprocessor's memory."""
    if find_spec("triton") is None:
        return None
    # Some builds of torch bring it under another package's name: only the module itself knows its version.
    version = import_module("triton").__version__
    kernels = import_module("app.engine.gpu.kernels.triton.operations").TritonKernels(shared_bytes=shared_bytes)
    return LoadedKernels(kernels, f"triton-{version}")


def check_triton(start: Callable[[], object] = lambda: import_module("triton.runtime").driver.active) -> None:
    """Refuses a Triton that is installed but cannot work here. Raises ValueError. start: compiles what it is driven by.

    It takes a C compiler and Python's headers, which a slim image has not; the first step would find that out, too, and
    so would every engine that is started after it.
    """
    if find_spec("triton") is None:
        return
    try:
        start()
    except (RuntimeError, OSError, ImportError, AssertionError, subprocess.SubprocessError) as error:
        words = " ".join(str(error).split())[:_MOST_CHARACTERS]
        raise ValueError(
            f"Triton cannot start on this machine ({words}): it takes gcc and Python's headers (python3-dev); install "
            "them, or give --kernels torch, without --quantize"
        ) from None


def rounded_kernels(device: torch.device, dtype: torch.dtype) -> RoundedKernels:
    """Triton's kernels on a GPU that has Triton; else, and in float32, the reference versions."""
    if device.type != "cuda" or dtype == torch.float32 or find_spec("triton") is None:
        return TWINS
    products = import_module("app.engine.gpu.kernels.triton.quantized_products")
    return RoundedKernels(int8_product=products.product, fp8_rows=products.round_rows)
