"""The weights with the fewest held-out bits per byte so far: with little text, a run gets worse before it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from model.transformer import Decoder


class Best:
    """A copy of the best weights measured, in the machine's memory, and what they were."""

    def __init__(self) -> None:
        self.step = 0
        self.bits = math.inf
        self._weights: dict[str, Tensor] = {}

    def consider(self, decoder: Decoder, step: int, bits: float) -> None:
        """Keeps the decoder's weights where they are the best. Of equal ones the first stays."""
        if bits < self.bits:
            self.step, self.bits = step, bits
            # One copy, taken from the device where they are: .cpu() alone would share a CPU's own weights.
            self._weights = {name: p.detach().to("cpu", copy=True) for name, p in decoder.named_parameters()}

    @torch.no_grad()
    def settle(self, decoder: Decoder) -> None:
        """Leaves the best weights in the decoder: nothing is learnt any more."""
        for name, parameter in decoder.named_parameters():
            parameter.copy_(self._weights[name])

    def tensors(self) -> dict[str, Tensor]:
        """The weights by name; none before the first measurement."""
        return self._weights

    def load(self, tensors: Mapping[str, Tensor], *, step: int, bits: float) -> None:
        """Puts back what a snapshot kept."""
        self.step, self.bits, self._weights = step, bits, dict(tensors)
