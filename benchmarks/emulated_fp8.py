"""A decoder that rounds as `--quantize fp8` does on a GPU, on a CPU: what that costs in quality, without its speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from app.engine.gpu.linears import make_linear
from model.checkpoint import load
from model.layers import Linear
from model.reference import logits
from model.transformer import Decoder


def emulate_fp8(decoder: Decoder) -> None:
    """Puts an fp8 product behind each matrix of the layers. The head must be tied: such a one stays as it is."""
    assert decoder.untied_head is None, "a head of its own would be rounded too"
    for owner in decoder.modules():
        if isinstance(owner, Linear):
            owner.product = partial(_product, make_linear(owner.weight, owner.bias, "fp8"))


class EmulatedFp8:
    """The decoder of a weights directory in bfloat16, but for its products."""

    def __init__(self, weights: Path) -> None:
        self._decoder = load(weights, device=torch.device("cpu"), dtype=torch.bfloat16).decoder
        self.context = self._decoder.config.context
        emulate_fp8(self._decoder)

    def log_probabilities(self, window: tuple[int, ...]) -> list[float]:
        """Of each token but the first."""
        logprobs_TV = logits(self._decoder, list(window))[:-1].log_softmax(-1)
        found: list[float] = logprobs_TV.gather(1, torch.tensor(window[1:])[:, None])[:, 0].tolist()
        return found


def _product(linear: Callable[[Tensor], Tensor], x: Tensor, _weight: Tensor, _bias: Tensor | None) -> Tensor:
    return linear(x)
