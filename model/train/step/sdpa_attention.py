"""Causal attention by torch's own fused kernel, with its own gradient: for GPUs, and to be compiled. Knows no cache.

Shape legend: T tokens, H query heads, K kv heads, C head_dim, B sequences, N tokens of each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from model.nn.attention import hidden


class FusedAttend:
    """Computes model.nn.attention.CausalAttend: sequences of one length, each token over itself and those before."""

    def __init__(self, length: int, window: int | None = None) -> None:
        self.length = length
        """Tokens of each sequence; T is a multiple of it."""
        self.window = window
        """ModelConfig.sliding_window."""

    def __call__(self, _layer: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> Tensor:
        group = q_THC.shape[1] // k_TKC.shape[1]
        # Of a GPU's kernels only that for 16 bits shares keys among heads; for float32 they would be very slow.
        shares = group > 1 and v_TKC.dtype != torch.float32
        if group > 1 and not shares:
            k_TKC, v_TKC = (x_TKC.repeat_interleave(group, 1) for x_TKC in (k_TKC, v_TKC))
        q_BHNC, k_BKNC, v_BKNC = (
            x.to(v_TKC.dtype).unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q_THC, k_TKC, v_TKC)
        )
        seen_NN = None if self.window is None else ~self._hidden(q_THC.device)
        out_BHNC = F.scaled_dot_product_attention(
            q_BHNC, k_BKNC, v_BKNC, attn_mask=seen_NN, is_causal=seen_NN is None, enable_gqa=shares
        )
        return out_BHNC.transpose(1, 2).flatten(0, 1)

    def _hidden(self, device: torch.device) -> Tensor:
        return hidden(torch.arange(self.length, device=device)[:, None], self.length, self.window)
