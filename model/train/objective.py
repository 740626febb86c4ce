"""What training minimises and what is reported: cross-entropy per token, bits per byte. Knows no optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import CausalAttend, CrossAttend, EncoderAttend, MemoryAttend
from model.train.batch import IGNORED, Batch
from model.transformer import Decoder


class Objective:
    """The decoder's loss on batches, computed in `dtype`."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self.decoder = decoder
        self.device = device
        self.dtype = dtype

    def loss_sum(self, batch: Batch) -> Tensor:
        """Nats, summed over the targets that count."""
        inputs_T, targets_T = (x_RN.flatten().to(self.device) for x_RN in (batch.inputs_RN, batch.targets_RN))
        attend = CausalAttend(batch.inputs_RN.shape[1], self.decoder.config.sliding_window)
        with self._autocast():
            hidden_TD = self.decoder(inputs_T, self._positions(batch.inputs_RN), attend, self._read_source(batch))
            logits_TV = self.decoder.head(hidden_TD)
        return F.cross_entropy(logits_TV.float(), targets_T, reduction="sum", ignore_index=IGNORED)

    @torch.no_grad()
    def bits_per_byte(self, batches: Iterable[Batch], bytes_of: Sequence[bytes]) -> float:
        """Bits needed per byte of the targets' text."""
        nats, n_bytes = 0.0, 0
        for batch in batches:
            nats += float(self.loss_sum(batch))
            counted = batch.targets_RN[batch.targets_RN.ne(IGNORED)]
            n_bytes += sum(len(bytes_of[token]) for token in counted.tolist())
        return nats / math.log(2) / max(n_bytes, 1)

    def _read_source(self, batch: Batch) -> CrossAttend | None:
        if batch.sources is None:
            return None
        tokens_RS, real_RS = batch.sources.tokens_RS.to(self.device), batch.sources.real_RS.to(self.device)
        kv = self.decoder.encode(tokens_RS.flatten(), self._positions(tokens_RS), EncoderAttend(real_RS))
        return MemoryAttend(kv, real_RS)

    def _positions(self, tokens_RN: Tensor) -> Tensor:
        return torch.arange(tokens_RN.shape[1], device=self.device).repeat(len(tokens_RN))

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, dtype=self.dtype)
