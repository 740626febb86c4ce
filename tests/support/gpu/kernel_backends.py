"""Device and shapes of kernel tests: a GPU if there is one, else Triton's interpreter with small shapes.

The interpreter of Triton 3.7 and 3.8 multiplies bfloat16 as integers, and truncates where it should round: only GPUs
and tests/engine/gpu/test_kernel_compilation.py test that format.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from app.engine.gpu.kernels.interface import Kernels
from benchmarks.gpu.conformance.attention import Shape
from benchmarks.gpu.conformance.harness import triton_kernels
from benchmarks.gpu.reference_kernels import ReferenceKernels
from tests.support.gpu.triton_interpreter import repair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INSTALLED = find_spec("triton") is not None
if INSTALLED:
    repair()
needs_triton = pytest.mark.skipif(not INSTALLED, reason="Triton is not installed: make install EXTRAS=gpu")

BOTH = ["torch", pytest.param("triton", marks=[needs_triton, pytest.mark.slow])]
"""Kernels under test."""
FORMATS = [torch.float32, torch.float16] if DEVICE == "cpu" else [torch.float32, torch.float16, torch.bfloat16]

SHAPES = {
    "prefill": Shape(n_heads=6, n_kv_heads=2, head_dim=32, block_size=16, lengths=(21, 40, 1)),
    "shared": Shape(n_heads=2, n_kv_heads=2, head_dim=64, block_size=48, lengths=(100, 60), shared_blocks=1),
    "window": Shape(n_heads=4, n_kv_heads=1, head_dim=80, block_size=32, lengths=(130, 12), window=33),
    "wide": Shape(n_heads=8, n_kv_heads=1, head_dim=96, block_size=64, lengths=(516,)),
    "long": Shape(n_heads=3, n_kv_heads=1, head_dim=256, block_size=128, lengths=(1100, 512, 513, 1)),
    "late": Shape(n_heads=2, n_kv_heads=1, head_dim=24, block_size=64, lengths=(1111, 1112, 30), window=600),
    "sinks": Shape(n_heads=6, n_kv_heads=2, head_dim=32, block_size=32, lengths=(530, 12), sinks=True),
}
"""Groups of 1 to 8 heads, odd head sizes and blocks, and sequences that end at, before and after the end of a split."""


def kernels(kind: str, **options: int) -> Kernels:
    """Kernels of this kind: "torch" or "triton"."""
    return ReferenceKernels() if kind == "torch" else triton_kernels(**options)
