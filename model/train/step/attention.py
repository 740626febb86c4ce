"""Attention for training: the layout of q, k and v, torch's fused kernel, and a CPU version with its own gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from model.config import ModelConfig
from model.nn.attention import hidden

# Shape legend: T tokens, H query heads, K kv heads, C head_dim, B sequences, N tokens of each.


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


# What model.nn.attention.CausalAttend computes, by the same tiles. Autograd kept the scores of every tile in float32
# and filled whole matrices with zeros for each slice; here only the weights are kept, in the format of the computation.
#
# Shape legend: T tokens, H query heads, K kv heads, G = H / K, C head_dim, N tokens of a sequence, M sequences times K,
# R = N G rows of queries (those of one token stand together), Y rows of a tile, X keys of a tile.

_TILE = 128


class TrainingAttend:
    """Whole sequences of one length behind one another, each token over itself and those before it."""

    def __init__(self, length: int, window: int | None = None) -> None:
        self.length = length
        """Tokens of each sequence; T is a multiple of it."""
        self.tiles = tiles_of(length, window)

    def __call__(self, _layer: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> Tensor:
        n_kv_heads, group = k_TKC.shape[1], q_THC.shape[1] // k_TKC.shape[1]
        q_MRC = _by_kv_head(q_THC.unflatten(1, (n_kv_heads, group)), self.length).flatten(1, 2)
        k_MNC, v_MNC = (_by_kv_head(x_TKC, self.length) for x_TKC in (k_TKC, v_TKC))
        out_MRC: Tensor = _Attention.apply(q_MRC, k_MNC, v_MNC, self.tiles)  # type: ignore[no-untyped-call]
        out_BKNGC = out_MRC.unflatten(1, (-1, group)).unflatten(0, (-1, n_kv_heads))
        out_BNKGC: Tensor = out_BKNGC.transpose(1, 2)
        return out_BNKGC.reshape(q_THC.shape)


@dataclass(frozen=True, slots=True)
class Tile:
    """Some queries of a sequence, and the keys that any of them looks at."""

    start: int
    stop: int
    first_key: int
    hidden_NX: Tensor
    """0 where a query looks, minus infinity where it may not."""

    @staticmethod
    def make(start: int, length: int, window: int | None) -> Tile:
        """For the queries from `start` on."""
        stop = min(start + _TILE, length)
        first = 0 if window is None else max(0, start - window + 1)
        positions_N1 = torch.arange(start, stop)[:, None]
        mask_NX = hidden(positions_N1, stop, window)[:, first:]
        hidden_NX = torch.zeros(mask_NX.shape).masked_fill(mask_NX, float("-inf"))
        return Tile(start, stop, first, hidden_NX)

    def rows(self, group: int) -> slice:
        """Of R."""
        return slice(self.start * group, self.stop * group)

    @property
    def keys(self) -> slice:
        """Of N."""
        return slice(self.first_key, self.stop)


def tiles_of(length: int, window: int | None) -> list[Tile]:
    """All queries of a sequence."""
    return [Tile.make(start, length, window) for start in range(0, length, _TILE)]


def attention(q_MRC: Tensor, k_MNC: Tensor, v_MNC: Tensor, tiles: list[Tile]) -> tuple[Tensor, list[Tensor]]:
    """softmax(q k^T / sqrt(C)) v, and the weights of each tile."""
    group, scale = q_MRC.shape[1] // k_MNC.shape[1], q_MRC.shape[-1] ** -0.5
    out_MRC, weights = torch.empty_like(q_MRC), []
    with torch.autocast(q_MRC.device.type, enabled=False):  # which would have softmax make float32 of everything
        for tile in tiles:
            rows, keys = tile.rows(group), tile.keys
            mask_YX = tile.hidden_NX.to(q_MRC).repeat_interleave(group, 0)
            scores_MYX = torch.baddbmm(mask_YX, q_MRC[:, rows], k_MNC[:, keys].mT, alpha=scale)
            weights_MYX = scores_MYX.softmax(-1)
            torch.bmm(weights_MYX, v_MNC[:, keys], out=out_MRC[:, rows])
            weights.append(weights_MYX)
    return out_MRC, weights


def attention_backward(
    grad_MRC: Tensor, q_MRC: Tensor, k_MNC: Tensor, v_MNC: Tensor, weights: list[Tensor], tiles: list[Tile]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    group, scale = q_MRC.shape[1] // k_MNC.shape[1], q_MRC.shape[-1] ** -0.5
    dq_MRC, dk_MNC, dv_MNC = torch.empty_like(q_MRC), torch.zeros_like(k_MNC), torch.zeros_like(v_MNC)
    for tile, weights_MYX in zip(tiles, weights, strict=True):
        rows, keys = tile.rows(group), tile.keys
        dout_MYC = grad_MRC[:, rows]
        dv_MNC[:, keys].baddbmm_(weights_MYX.mT, dout_MYC)
        dweights_MYX = dout_MYC @ v_MNC[:, keys].mT
        dscores_MYX = torch._softmax_backward_data(dweights_MYX, weights_MYX, -1, weights_MYX.dtype)
        torch.bmm(dscores_MYX, k_MNC[:, keys], out=dq_MRC[:, rows])
        dk_MNC[:, keys].baddbmm_(dscores_MYX.mT, q_MRC[:, rows], alpha=scale)
    return dq_MRC.mul_(scale), dk_MNC, dv_MNC


class _Attention(Function):
    @staticmethod
    def forward(ctx: Any, q_MRC: Tensor, k_MNC: Tensor, v_MNC: Tensor, tiles: list[Tile]) -> Tensor:
        out_MRC, weights = attention(q_MRC, k_MNC, v_MNC, tiles)
        ctx.save_for_backward(q_MRC, k_MNC, v_MNC, *weights)
        ctx.tiles = tiles
        return out_MRC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MRC: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_MRC, k_MNC, v_MNC, *weights = ctx.saved_tensors
        return *attention_backward(grad_MRC, q_MRC, k_MNC, v_MNC, weights, ctx.tiles), None


def _by_kv_head(x_TKX: Tensor, length: int) -> Tensor:
    """[T, K, ..] -> [M, N, ..], whole in memory."""
    x_MNX: Tensor = x_TKX.unflatten(0, (-1, length)).transpose(1, 2).flatten(0, 1)
    return x_MNX.contiguous()


# A head is turned as x cos + swapped(x) sin, its halves swapped by a copy: the inner loops are then as long as the
# heads that share a kv head, not half of one (preset small: 2 % of a gradient's time, where half by half it took 6 %).
#
# Shape legend: T tokens, H query heads, K kv heads, G = H / K, C head_dim, F its half, B sequences, N tokens of each,
# M = B K, R = N G rows of queries, L = G C or C, W = (H + 2 K) C.


@dataclass(frozen=True, slots=True)
class Positions:
    """Of the tokens of a micro-batch; all sequences are equally long."""

    cos_NL: Tensor
    """For the queries of a kv head; its key takes the first C columns."""
    sin_NL: Tensor
    """Negative for the first half of each head."""
    tiles: list[Tile]

    @staticmethod
    def make(rope_NC: Tensor, group: int, tiles: list[Tile]) -> Positions:
        """From cosines and sines [N, F] side by side."""
        cos_NF, sin_NF = rope_NC.chunk(2, dim=-1)
        return Positions(cos_NF.repeat(1, 2 * group), torch.cat((-sin_NF, sin_NF), -1).repeat(1, group), tiles)


def _parts(qkv_TW: Tensor, at: Positions, config: ModelConfig) -> list[Tensor]:
    """q, k, v [B, K, N, L] as they lie in the product."""
    length, n_kv = len(at.cos_NL), config.n_kv_heads
    sizes = [heads * config.head_dim for heads in (config.n_heads, n_kv, n_kv)]
    parts = qkv_TW.unflatten(0, (-1, length)).split(sizes, dim=-1)
    return [part.unflatten(-1, (n_kv, -1)).transpose(1, 2) for part in parts]


def _swapped(x: Tensor, head_dim: int) -> Tensor:
    """The two halves of each head the other way round."""
    halves = x.unflatten(-1, (-1, 2, head_dim // 2))
    return torch.cat((halves[..., 1:, :], halves[..., :1, :]), -2).flatten(-3)


def _turn(x_BKNL: Tensor, swapped_BKNL: Tensor, at: Positions, sign: int, out_BKNL: Tensor) -> None:
    """Writes x turned, or with sign -1 turned back."""
    size = x_BKNL.shape[-1]
    torch.mul(x_BKNL, at.cos_NL[:, :size], out=out_BKNL)
    out_BKNL.addcmul_(swapped_BKNL, at.sin_NL[:, :size], value=sign)


def to_heads(qkv_TW: Tensor, at: Positions, config: ModelConfig) -> list[Tensor]:
    """q [M, R, C], k and v [M, N, C], whole in memory; q and k turned."""
    parts, swapped = (_parts(x_TW, at, config) for x_TW in (qkv_TW, _swapped(qkv_TW, config.head_dim)))
    found = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
    for i in range(2):
        _turn(parts[i], swapped[i], at, 1, found[i])
    found[2].copy_(parts[2])
    return [out.unflatten(-1, (-1, config.head_dim)).flatten(2, 3).flatten(0, 1) for out in found]


def from_heads(dq_MRC: Tensor, dk_MNC: Tensor, dv_MNC: Tensor, at: Positions, config: ModelConfig) -> Tensor:
    """The gradient of the product that to_heads was given."""
    width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    dqkv_TW = dq_MRC.new_empty(dk_MNC.shape[0] // config.n_kv_heads * dk_MNC.shape[1], width)
    dq, dk, dv = _parts(dqkv_TW, at, config)
    for grad, out in ((dq_MRC, dq), (dk_MNC, dk)):
        _turn(grad.view(out.shape), _swapped(grad, config.head_dim).view(out.shape), at, -1, out)
    dv.copy_(dv_MNC.view(dv.shape))
    return dqkv_TW


def by_kv_heads(x_TH: Tensor, at: Positions, config: ModelConfig) -> Tensor:
    """[T, H C] -> [M, R, C], whole in memory."""
    x_BNKGC = x_TH.view(-1, len(at.cos_NL), config.n_kv_heads, config.n_heads // config.n_kv_heads, config.head_dim)
    return x_BNKGC.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def from_kv_heads(x_MRC: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of by_kv_heads."""
    group, n_kv = config.n_heads // config.n_kv_heads, config.n_kv_heads
    x_BKNGC = x_MRC.view(-1, n_kv, x_MRC.shape[1] // group, group, config.head_dim)
    return x_BKNGC.transpose(1, 2).flatten(2).flatten(0, 1)
