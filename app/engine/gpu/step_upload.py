"""What the host tells the device of a step, in one copy. Knows nothing of what the numbers mean."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch
from torch import Tensor

from app.engine.gpu.kernels.launch_config import ALIGNED


class Upload:
    """Sections of int32 behind one another; nobody waits for their way to the device.

    Each begins at a multiple of 16 bytes, as kernels want their pointers.
    The host's side is pinned memory out of torch's own pool, which gives it to nobody else before the copy is done.
    """

    def __init__(self) -> None:
        self._numbers = array("i")

    def add(self, numbers: Iterable[int]) -> slice:
        """One more section; where it will lie."""
        self._numbers.extend([0] * (-len(self._numbers) % ALIGNED))
        start = len(self._numbers)
        self._numbers.extend(numbers)
        return slice(start, len(self._numbers))

    def send(self, device: torch.device) -> Tensor:
        """[all sections] int32 on the device."""
        if not self._numbers:
            return torch.empty(0, dtype=torch.int32, device=device)
        numbers_X = torch.frombuffer(self._numbers, dtype=torch.int32)
        if device.type != "cuda":
            return numbers_X.clone()
        pinned_X = torch.empty(len(numbers_X), dtype=torch.int32, pin_memory=True).copy_(numbers_X)
        return pinned_X.to(device, non_blocking=True)


class Download:
    """Numbers on their way from the device."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """On the host, once they are there: the only place where the host waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers
