"""Whether tensors hold finite numbers only, found out on their device and read once for all of them. Knows no files.

To read an answer is to wait for the device, so it is put off until all tensors are on their way.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from model.files import CheckpointError

_IN = {
    torch.bfloat16: " in bfloat16; if inkstream check accepts the weights, serve them with --dtype float32",
}


class FiniteCheck:
    """Collects an answer for each tensor."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Path, str, torch.dtype]] = []
        self._answers: list[Tensor] = []

    def note(self, path: Path, name: str, tensor: Tensor) -> Tensor:
        """`tensor` as it is; whether it is finite is told by require()."""
        self._tensors.append((path, name, tensor.dtype))
        # Unlike isfinite over all of it, this makes no copy as large as the tensor.
        self._answers.append(torch.isfinite(torch.stack(tensor.aminmax())).all())
        return tensor

    def require(self) -> None:
        """Raises CheckpointError with the name of the first tensor that is not finite."""
        answers = torch.stack(self._answers).tolist() if self._answers else []
        for (path, name, dtype), is_finite in zip(self._tensors, answers, strict=True):
            if not is_finite:
                raise CheckpointError(f"{path}: {name} holds numbers that are not finite{_IN.get(dtype, '')}")
