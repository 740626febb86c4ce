"""What training minimises and what is reported: cross-entropy per token, bits per byte. Knows no optimiser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import CausalAttend
from model.transformer import Decoder


class Objective:
    """The decoder's loss on windows of one length, computed in `dtype`."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self.decoder = decoder
        self.device = device
        self.dtype = dtype

    def loss_sum(self, windows_BN: Tensor) -> Tensor:
        """Nats, summed over the targets windows[:, 1:] given windows[:, :-1]."""
        inputs_T, targets_T = (x_BN.flatten().to(self.device) for x_BN in (windows_BN[:, :-1], windows_BN[:, 1:]))
        length = windows_BN.shape[1] - 1
        positions_T = torch.arange(length, device=self.device).repeat(len(windows_BN))
        with self._autocast():
            hidden_TD = self.decoder(inputs_T, positions_T, CausalAttend(length, self.decoder.config.sliding_window))
            logits_TV = self.decoder.head(hidden_TD)
        return F.cross_entropy(logits_TV.float(), targets_T, reduction="sum")

    @torch.no_grad()
    def bits_per_byte(self, tokens_N: Tensor, bytes_of: Sequence[bytes]) -> float:
        """Bits needed per byte of a text, read in windows of the context; the first token is given."""
        context = self.decoder.config.context
        nats = 0.0
        for start in range(0, len(tokens_N) - 1, context):
            nats += float(self.loss_sum(tokens_N[None, start : start + context + 1]))
        n_bytes = sum(len(bytes_of[token]) for token in tokens_N[1:].tolist())
        return nats / math.log(2) / max(n_bytes, 1)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, dtype=self.dtype)
