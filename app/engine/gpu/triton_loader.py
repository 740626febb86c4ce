"""Loads the Triton kernels, or for quantized products the reference if Triton is not installed.

Triton is an optional dependency, and only this file checks for it.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from app.engine.gpu.kernels.interface import SHARED_BYTES, Kernels
from app.engine.quantization.quantized_weights import (
    Fp8RowQuantizer,
    PackedProduct,
    packed_product,
    quantize_fp8_rows,
)

_MAX_MESSAGE_LENGTH = 200
_ENGINE = Path(__file__).parents[1]
_MODEL = Path(__file__).parents[3] / "model"


class LoadedKernels(NamedTuple):
    """Kernels, and their name in receipts."""

    kernels: Kernels
    numerics: str


@dataclass(frozen=True, slots=True)
class QuantizedKernels:
    """Kernels for products of quantized matrices. The defaults are the reference implementations, for any device."""

    packed_product: PackedProduct = packed_product
    fp8_rows: Fp8RowQuantizer = quantize_fp8_rows


REFERENCE_KERNELS = QuantizedKernels()


def triton_kernels(shared_bytes: int = SHARED_BYTES) -> LoadedKernels | None:
    """The Triton kernels, or None if Triton is not installed. shared_bytes: shared memory limit of a program."""
    if find_spec("triton") is None:
        return None
    # Some builds of torch ship it under another distribution name, so ask the module for its version.
    version = import_module("triton").__version__
    kernels = import_module("app.engine.gpu.kernels.triton.operations").TritonKernels(shared_bytes=shared_bytes)
    return LoadedKernels(kernels, f"triton-{version}-{sources_key()}")


def sources_key(engine: Path = _ENGINE, model: Path = _MODEL) -> str:
    """Eight digits of a hash of what the bits of a step depend on: sources of kernels, tile sizes, products.

    Every edit of them changes it, since a change of bits is easily overlooked. engine, model: app/engine and model.
    """
    gpu = ("decoder.py", "linears.py", "kernels/interface.py", "kernels/triton/*.py")
    parts = ("quantization/quantized_weights.py", *(f"gpu/{part}" for part in gpu))
    sources = sorted(path for part in parts for path in engine.glob(part))
    sources += [model / part for part in ("nn/packed_tensors.py", "packed_matrix.py", "quantize.py")]
    contents = [path.name.encode() + b"\0" + path.read_bytes() + b"\0" for path in sources]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:8]


def check_triton(load_driver: Callable[[], object] = lambda: import_module("triton.runtime").driver.active) -> None:
    """Raises ValueError if Triton is installed but cannot run here. load_driver: compiles and loads Triton's driver.

    Triton needs a C compiler and Python's headers, which a slim image lacks. Without this check the first step would
    fail, and so would every restarted engine.
    """
    if find_spec("triton") is None:
        return
    try:
        load_driver()
    except (RuntimeError, OSError, ImportError, AssertionError, subprocess.SubprocessError) as error:
        reason = " ".join(str(error).split())[:_MAX_MESSAGE_LENGTH]
        raise ValueError(
            f"Triton cannot start on this machine ({reason}): it needs gcc and Python's headers (python3-dev); install "
            "them, or use --kernels torch without --quantize"
        ) from None


def quantized_kernels(device: torch.device, dtype: torch.dtype) -> QuantizedKernels:
    """Triton's kernels on a GPU with Triton; otherwise, and in float32, the reference implementations."""
    if device.type != "cuda" or dtype == torch.float32 or find_spec("triton") is None:
        return REFERENCE_KERNELS
    products = import_module("app.engine.gpu.kernels.triton.quantized_products")
    return QuantizedKernels(packed_product=products.packed_product, fp8_rows=products.quantize_fp8_rows)
