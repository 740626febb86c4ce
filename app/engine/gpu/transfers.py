"""Asynchronous copies between host and device.

Shape legend: X numbers, flattened.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

import torch
from torch import Tensor

from app.engine.gpu.kernels.sample_out import ALIGNED

EMPTY = slice(0, 0)


class Upload:
    """Concatenated sections of int32, copied to the device asynchronously.

    Each section starts at a multiple of 16 bytes, which the kernels require of their pointers. The host side is pinned
    memory from torch's caching allocator, which does not reuse it before the copy has finished.
    """

    def __init__(self) -> None:
        self._numbers = array("i")

    def add(self, numbers: Collection[int], size: int = 0) -> slice:
        """Appends a section of at least `size` numbers and returns its range in the result of send()."""
        if not numbers and not size:
            return EMPTY
        self._numbers.extend([0] * (-len(self._numbers) % ALIGNED))
        start = len(self._numbers)
        self._numbers.extend(numbers if isinstance(numbers, array) else array("i", numbers))  # an array's is fast
        self._numbers.extend([0] * (start + size - len(self._numbers)))
        return slice(start, len(self._numbers))

    def send(self, device: torch.device) -> Tensor:
        """Copies all sections to the device, as one int32 tensor."""
        if not self._numbers:
            return torch.empty(0, dtype=torch.int32, device=device)
        numbers_X = torch.frombuffer(self._numbers, dtype=torch.int32)
        if device.type != "cuda":
            return numbers_X.clone()
        pinned_X = torch.empty(len(numbers_X), dtype=torch.int32, pin_memory=True).copy_(numbers_X)
        return pinned_X.to(device, non_blocking=True)


class Download:
    """An asynchronous copy from the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not numbers.is_cuda:
            self._numbers = numbers.clone()
        else:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Waits for the copy. Nothing else makes the host wait for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers
