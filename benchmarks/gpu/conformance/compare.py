"""How close two results are, and whether they are the same to the bit.

Rows are the mappings that conformance/__init__.py names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]

_UNITS = {torch.float32: 64, torch.float16: 4, torch.bfloat16: 4}
"""Units in the last place that a result may be off: a GPU's float32 exponentials and sums, a few roundings else."""
_ELSEWHERE = 0.02
"""Share of 16-bit numbers that may be rounded to a neighbor, for a float32 sum near the midpoint of two."""
_INTEGERS = {4: torch.int32, 2: torch.int16}


def close(what: str, found: Tensor, expected: Tensor) -> Row:
    """Against a reference in float64; its unit is that of the larger of 1 and the expected number."""
    allowed = _UNITS[found.dtype] * torch.finfo(found.dtype).eps * expected.abs().clamp(min=1.0)
    worst = ((found.double() - expected).abs() / allowed).max().item() if found.numel() else 0.0
    return {"what": what, "ok": worst <= 1.0, "value": worst, "unit": "of what is allowed"}  # NaN is not <= 1


def rounded(what: str, found: Tensor, expected: Tensor) -> Row:
    """Mostly what the reference comes to when it is rounded: a rounding left out, or one too many, shows in the rest.

    In float32 it says nothing, since there sums differ that much.
    """
    share = (found != expected.to(found.dtype)).double().mean().item()
    ok = found.dtype == torch.float32 or share <= _ELSEWHERE
    return {"what": f"{what}: rounded", "ok": ok, "value": share, "unit": "of all numbers are not the nearest"}


def same_bits(what: str, found: Tensor, expected: Tensor) -> Row:
    """Numbers that are none count, too."""
    kind = _INTEGERS[found.element_size()]
    differ = int((found.contiguous().view(kind) != expected.contiguous().view(kind)).sum())
    return {"what": what, "ok": not differ, "value": differ, "unit": f"of {found.numel()} numbers differ"}


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills new allocations with NaN, so that a read of memory that no kernel wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
