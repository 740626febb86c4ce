"""What products of rounded matrices are computed with: the door to their Triton kernels, or plain torch. No triton."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from app.engine.kernels.fp8 import Fp8Rows, round_rows
from app.engine.kernels.int8 import Int8Product, dequantised_product


@dataclass(frozen=True, slots=True)
class RoundedKernels:
    """As they stand: torch's twins, on any device."""

    int8_product: Int8Product = dequantised_product
    fp8_rows: Fp8Rows = round_rows


TWINS = RoundedKernels()


def rounded_kernels(device: torch.device, dtype: torch.dtype) -> RoundedKernels:
    """The kernels on a GPU where Triton is installed; else the twins, as in float32, where tensor cores would round."""
    if device.type != "cuda" or dtype == torch.float32 or find_spec("triton") is None:
        return TWINS
    int8, fp8 = (import_module(f"app.engine.kernels.triton_{kind}") for kind in ("int8", "fp8"))
    return RoundedKernels(int8_product=int8.product, fp8_rows=fp8.round_rows)
