"""Attention without a cache: training, the encoder, the reference implementation.

Paged attention is in app/engine/execution/torch_executor.py. Shape legend: T tokens, H query heads, K kv heads, G =
H / K, C head_dim, B sequences, N tokens of each, S tokens of each source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_SINK_COLUMNS = 64


class Attend(Protocol):
    """softmax(q k^T / sqrt(C)) v of each token over its own sequence; may cache keys and values for later steps."""

    def __call__(
        self, layer: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, sinks_H: Tensor | None = None, /
    ) -> Tensor:
        """Returns [T, H, C]. sinks: see softmax_with_sinks()."""
        ...


class CrossAttend(Protocol):
    """softmax(q k^T / sqrt(C)) v of each token over the source of its sequence."""

    def __call__(self, layer: int, q_THC: Tensor, /) -> Tensor:
        """Returns [T, H, C]."""
        ...


class CausalAttend:
    """Causal attention over concatenated sequences of equal length, by torch's scaled_dot_product_attention."""

    def __init__(self, length: int, windows: Sequence[int | None], soft_cap: float | None = None) -> None:
        self.length = length
        """Tokens of each sequence; T is a multiple of it."""
        self.windows = windows
        """ModelConfig.windows."""
        self.soft_cap = soft_cap
        """ModelConfig.attention_soft_cap."""

    def __call__(
        self, layer: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        group = q_THC.shape[1] // k_TKC.shape[1]
        # On a GPU, only the 16-bit kernel supports grouped queries; the float32 one would be very slow with them.
        shares = group > 1 and v_TKC.dtype != torch.float32
        if group > 1 and not shares:
            k_TKC, v_TKC = (x_TKC.repeat_interleave(group, 1) for x_TKC in (k_TKC, v_TKC))
        q_BHNC, k_BKNC, v_BKNC = (
            x.to(v_TKC.dtype).unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q_THC, k_TKC, v_TKC)
        )
        positions_N1 = torch.arange(self.length, device=q_THC.device)[:, None]
        window = self.windows[layer]
        if self.soft_cap is not None or sinks_H is not None:
            hidden_NN = masked_positions(positions_N1, self.length, window)
            out_BHNC = _attention(q_BHNC, k_BKNC, v_BKNC, hidden_NN, self.soft_cap, sinks_H)
            return out_BHNC.transpose(1, 2).flatten(0, 1)
        seen_NN = None if window is None else ~masked_positions(positions_N1, self.length, window)
        out_BHNC = F.scaled_dot_product_attention(
            q_BHNC, k_BKNC, v_BKNC, attn_mask=seen_NN, is_causal=seen_NN is None, enable_gqa=shares
        )
        return out_BHNC.transpose(1, 2).flatten(0, 1)


def _attention(
    q_BHNC: Tensor,
    k_BKNC: Tensor,
    v_BKNC: Tensor,
    hidden_NN: Tensor,
    cap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """[B, H, N, C], with scores of cap * tanh(scores / cap) and with sinks, which torch's function lacks."""
    group = q_BHNC.shape[1] // k_BKNC.shape[1]
    k_BHNC, v_BHNC = (x_BKNC.repeat_interleave(group, 1) for x_BKNC in (k_BKNC, v_BKNC))
    scores_BHNN = (q_BHNC @ k_BHNC.transpose(2, 3)).float() * q_BHNC.shape[-1] ** -0.5
    if cap is not None:
        scores_BHNN = cap * torch.tanh(scores_BHNN / cap)
    scores_BHNN = scores_BHNN.masked_fill(hidden_NN, float("-inf"))
    weights_BHNN = softmax_with_sinks(scores_BHNN, None if sinks_H is None else sinks_H[:, None, None])
    out_BHNC: Tensor = weights_BHNN.to(v_BHNC.dtype) @ v_BHNC
    return out_BHNC


def softmax_with_sinks(scores_XL: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension and the sink, without the sink's own weight: the weights add up to less than 1.

    sinks: learned scores, one for each head, which broadcast with a last dimension of 1; None for none.
    """
    if sinks is None:
        return scores_XL.softmax(-1)
    # A whole tile of columns keeps the sums of a row in the same order for every number of keys.
    columns = F.pad(sinks.to(scores_XL.dtype), (0, _SINK_COLUMNS - 1), value=float("-inf"))
    columns_XS = columns.expand(*scores_XL.shape[:-1], _SINK_COLUMNS)
    return torch.cat((scores_XL, columns_XS), dim=-1).softmax(-1)[..., : scores_XL.shape[-1]]


class EncoderAttend:
    """Bidirectional attention over concatenated padded sources; padding is masked."""

    def __init__(self, real_BS: Tensor) -> None:
        self.real_BS = real_BS
        """True for tokens, False for padding."""

    def __call__(
        self, _layer: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, sinks_H: Tensor | None = None
    ) -> Tensor:
        assert sinks_H is None, "an encoder has no sinks"
        return _over_source(q_THC, k_TKC, v_TKC, self.real_BS)


class MemoryAttend:
    """Cross-attention over padded sources, with the keys and values of Decoder.encode."""

    def __init__(self, kv: list[tuple[Tensor, Tensor]], real_BS: Tensor) -> None:
        self.kv = kv
        self.real_BS = real_BS

    def __call__(self, layer: int, q_THC: Tensor) -> Tensor:
        return _over_source(q_THC, *self.kv[layer], self.real_BS)


def masked_positions(positions_X1: Tensor, length: int, window: int | None) -> Tensor:
    """[.., length] bool: which of the keys 0 .. length - 1 each query position must not attend to."""
    keys_L = torch.arange(length, device=positions_X1.device)
    masked_XL = keys_L.gt(positions_X1)
    return masked_XL if window is None else masked_XL | keys_L.le(positions_X1 - window)


def _over_source(q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, real_BS: Tensor) -> Tensor:
    """[T, H, C]: splits the queries into B equal runs, each attending to the real tokens of its own source."""
    batch, n_kv_heads = len(real_BS), k_TKC.shape[1]
    q_BKGNC: Tensor = q_THC.unflatten(1, (n_kv_heads, -1)).unflatten(0, (batch, -1)).permute(0, 2, 3, 1, 4)
    k_BKSC, v_BKSC = (x_TKC.unflatten(0, (batch, -1)).transpose(1, 2) for x_TKC in (k_TKC, v_TKC))
    scores_BKRS = (q_BKGNC.flatten(2, 3) @ k_BKSC.transpose(2, 3)).float() * q_THC.shape[-1] ** -0.5
    weights_BKRS = scores_BKRS.masked_fill(~real_BS[:, None, None], float("-inf")).softmax(-1).to(v_TKC.dtype)
    out_BKGNC: Tensor = (weights_BKRS @ v_BKSC).unflatten(2, q_BKGNC.shape[2:4])
    return out_BKGNC.permute(0, 3, 1, 2, 4).reshape(q_THC.shape)
