"""A decoder that emulates the rounding of `--quantize fp8` on a CPU, to measure its cost in quality."""

from __future__ import annotations

from pathlib import Path

import torch

from app.engine.gpu.linears import install
from model.checkpoint.checkpoint import load
from model.nn.reference import logits


class EmulatedFp8:
    """The decoder of a weights directory in bfloat16, but for its products."""

    def __init__(self, weights: Path) -> None:
        self._decoder = load(weights, device=torch.device("cpu"), dtype=torch.bfloat16).decoder
        self.context = self._decoder.config.context
        install(self._decoder, "fp8")

    def log_probabilities(self, window: tuple[int, ...]) -> list[float]:
        """Of each token but the first."""
        logprobs_TV = logits(self._decoder, list(window))[:-1].log_softmax(-1)
        found: list[float] = logprobs_TV.gather(1, torch.tensor(window[1:])[:, None])[:, 0].tolist()
        return found
