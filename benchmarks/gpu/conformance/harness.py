"""Kernels under test, comparisons of tensors, and random inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import Kernels
from benchmarks.gpu.reference_kernels import ReferenceKernels
from benchmarks.gpu.results import Finding

_MAX_ULPS = {torch.float32: 64, torch.float16: 4, torch.bfloat16: 4}
"""Tolerance in units in the last place, for a GPU's float32 exponentials and sums, and a few roundings."""
_MAX_SHARE_ROUNDED_OFF = 0.02
"""Share of 16-bit numbers that may be rounded to a neighbor, since a float32 sum may fall near the midpoint."""
_INTEGERS = {4: torch.int32, 2: torch.int16}


def kernels_under_test(device: str, **options: int) -> Kernels:
    """The device's kernels; on a CPU the reference kernels, to test the checks themselves."""
    return ReferenceKernels() if device == "cpu" else triton_kernels(**options)


def triton_kernels(**options: int) -> Kernels:
    """Triton's kernels; options are those of TritonKernels. Raises ImportError without Triton."""
    kernels: Kernels = import_module("app.engine.gpu.kernels.triton.operations").TritonKernels(**options)
    return kernels


def close(what: str, actual: Tensor, expected: Tensor) -> Finding:
    """Compares with a reference; the tolerance is relative to the larger of 1 and the expected number."""
    exact = expected.double()
    allowed = _MAX_ULPS[actual.dtype] * torch.finfo(actual.dtype).eps * exact.abs().clamp(min=1.0)
    worst = ((actual.double() - exact).abs() / allowed).max().item() if actual.numel() else 0.0
    return Finding(what=what, ok=worst <= 1.0, value=worst, unit="of what is allowed")  # NaN is not <= 1


def rounded(what: str, actual: Tensor, expected: Tensor) -> Finding:
    """Checks that most numbers equal the rounded reference, which shows a missing or an extra rounding.

    Always holds in float32, where sums differ more than that.
    """
    share = (actual != expected).double().mean().item()
    ok = actual.dtype == torch.float32 or share <= _MAX_SHARE_ROUNDED_OFF
    return Finding(what=f"{what}: rounded", ok=ok, value=share, unit="of all numbers are not the nearest")


def same_bits(what: str, actual: Tensor, expected: Tensor) -> Finding:
    """Compares bit patterns, so that NaN counts too."""
    kind = _INTEGERS[actual.element_size()]
    differ = int((actual.contiguous().view(kind) != expected.contiguous().view(kind)).sum())
    return Finding(what=what, ok=not differ, value=differ, unit=f"of {actual.numel()} numbers differ")


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills new allocations with NaN, so that reading memory that no kernel wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Normally distributed numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
