"""Attention for training: the layout of q, k and v, torch's fused kernel, and a CPU version with its own backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from model.config import ModelConfig
from model.nn.attention import masked_positions

# Shape legend: T tokens, H query heads, K kv heads, C head_dim, B sequences, N tokens of each.


class FusedAttend:
    """CausalAttend of model.nn.attention by torch's scaled_dot_product_attention."""

    def __init__(self, length: int, window: int | None = None) -> None:
        self.length = length
        """Tokens of each sequence; T is a multiple of it."""
        self.window = window
        """ModelConfig.sliding_window."""

    def __call__(self, _layer: int, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor) -> Tensor:
        group = q_THC.shape[1] // k_TKC.shape[1]
        # On a GPU, only the 16-bit kernel supports grouped queries; the float32 one would be very slow with them.
        shares = group > 1 and v_TKC.dtype != torch.float32
        if group > 1 and not shares:
            k_TKC, v_TKC = (x_TKC.repeat_interleave(group, 1) for x_TKC in (k_TKC, v_TKC))
        q_BHNC, k_BKNC, v_BKNC = (
            x.to(v_TKC.dtype).unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q_THC, k_TKC, v_TKC)
        )
        seen_NN = None if self.window is None else ~self._mask(q_THC.device)
        out_BHNC = F.scaled_dot_product_attention(
            q_BHNC, k_BKNC, v_BKNC, attn_mask=seen_NN, is_causal=seen_NN is None, enable_gqa=shares
        )
        return out_BHNC.transpose(1, 2).flatten(0, 1)

    def _mask(self, device: torch.device) -> Tensor:
        return masked_positions(torch.arange(self.length, device=device)[:, None], self.length, self.window)


# CausalAttend of model.nn.attention with the same tiles and a handwritten backward. Autograd saves the scores of every
# tile in float32 and fills whole matrices with zeros for each slice; this saves only the weights, in the compute dtype.
#
# Shape legend: T tokens, H query heads, K kv heads, G = H / K, C head_dim, N tokens of a sequence, M sequences times K,
# R = N G rows of queries (grouped by token), Y rows of a tile, X keys of a tile.

_TILE = 128


class TrainingAttend:
    """Causal attention over concatenated sequences of equal length, with a handwritten backward."""

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
    """A range of queries of a sequence, and the keys that they attend to."""

    start: int
    stop: int
    first_key: int
    bias_NX: Tensor
    """Added to the scores: 0 where a query attends, minus infinity where it must not."""

    @staticmethod
    def make(start: int, length: int, window: int | None) -> Tile:
        """The tile of queries that begins at `start`."""
        stop = min(start + _TILE, length)
        first = 0 if window is None else max(0, start - window + 1)
        positions_N1 = torch.arange(start, stop)[:, None]
        mask_NX = masked_positions(positions_N1, stop, window)[:, first:]
        bias_NX = torch.zeros(mask_NX.shape).masked_fill(mask_NX, float("-inf"))
        return Tile(start, stop, first, bias_NX)

    def rows(self, group: int) -> slice:
        """Range in R."""
        return slice(self.start * group, self.stop * group)

    @property
    def keys(self) -> slice:
        """Range in N."""
        return slice(self.first_key, self.stop)


def tiles_of(length: int, window: int | None) -> list[Tile]:
    """Tiles that cover all queries of a sequence."""
    return [Tile.make(start, length, window) for start in range(0, length, _TILE)]


def attention(q_MRC: Tensor, k_MNC: Tensor, v_MNC: Tensor, tiles: list[Tile]) -> tuple[Tensor, list[Tensor]]:
    """softmax(q k^T / sqrt(C)) v, and the weights of each tile."""
    group, scale = q_MRC.shape[1] // k_MNC.shape[1], q_MRC.shape[-1] ** -0.5
    out_MRC, weights = torch.empty_like(q_MRC), []
    with torch.autocast(q_MRC.device.type, enabled=False):  # autocast would compute softmax in float32
        for tile in tiles:
            rows, keys = tile.rows(group), tile.keys
            mask_YX = tile.bias_NX.to(q_MRC).repeat_interleave(group, 0)
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
    """[T, K, ..] -> [M, N, ..], contiguous."""
    x_MNX: Tensor = x_TKX.unflatten(0, (-1, length)).transpose(1, 2).flatten(0, 1)
    return x_MNX.contiguous()


# A head is rotated as x cos + swapped(x) sin, with its halves swapped by a copy: the inner loops then span all heads of
# a kv head instead of half a head (preset small: 2 % of the time of a gradient instead of 6 %).
#
# Shape legend: T tokens, H query heads, K kv heads, G = H / K, C head_dim, F its half, B sequences, N tokens of each,
# M = B K, R = N G rows of queries, L = G C or C, W = (H + 2 K) C.


@dataclass(frozen=True, slots=True)
class Positions:
    """Rotary tables and tiles for a micro-batch of sequences of equal length."""

    cos_NL: Tensor
    """Cosines for the queries of a kv head; its key uses the first C columns."""
    sin_NL: Tensor
    """Sines, negated for the first half of each head."""
    tiles: list[Tile]

    @staticmethod
    def make(rope_NC: Tensor, group: int, tiles: list[Tile]) -> Positions:
        """From cosines and sines [N, F], concatenated."""
        cos_NF, sin_NF = rope_NC.chunk(2, dim=-1)
        return Positions(cos_NF.repeat(1, 2 * group), torch.cat((-sin_NF, sin_NF), -1).repeat(1, group), tiles)


def _parts(qkv_TW: Tensor, positions: Positions, config: ModelConfig) -> list[Tensor]:
    """Views q, k, v [B, K, N, L] of the product."""
    length, n_kv = len(positions.cos_NL), config.n_kv_heads
    sizes = [heads * config.head_dim for heads in (config.n_heads, n_kv, n_kv)]
    parts = qkv_TW.unflatten(0, (-1, length)).split(sizes, dim=-1)
    return [part.unflatten(-1, (n_kv, -1)).transpose(1, 2) for part in parts]


def _swapped(x: Tensor, head_dim: int) -> Tensor:
    """Swaps the two halves of each head."""
    halves = x.unflatten(-1, (-1, 2, head_dim // 2))
    return torch.cat((halves[..., 1:, :], halves[..., :1, :]), -2).flatten(-3)


def _rotate(x_BKNL: Tensor, swapped_BKNL: Tensor, positions: Positions, sign: int, out_BKNL: Tensor) -> None:
    """Writes x rotated by its position, or rotated back with sign -1."""
    size = x_BKNL.shape[-1]
    torch.mul(x_BKNL, positions.cos_NL[:, :size], out=out_BKNL)
    out_BKNL.addcmul_(swapped_BKNL, positions.sin_NL[:, :size], value=sign)


def to_heads(qkv_TW: Tensor, positions: Positions, config: ModelConfig) -> list[Tensor]:
    """q [M, R, C], k and v [M, N, C], contiguous; q and k rotated."""
    parts, swapped = (_parts(x_TW, positions, config) for x_TW in (qkv_TW, _swapped(qkv_TW, config.head_dim)))
    outputs = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
    for i in range(2):
        _rotate(parts[i], swapped[i], positions, 1, outputs[i])
    outputs[2].copy_(parts[2])
    return [out.unflatten(-1, (-1, config.head_dim)).flatten(2, 3).flatten(0, 1) for out in outputs]


def from_heads(dq_MRC: Tensor, dk_MNC: Tensor, dv_MNC: Tensor, positions: Positions, config: ModelConfig) -> Tensor:
    """Gradient of the input of to_heads()."""
    width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    dqkv_TW = dq_MRC.new_empty(dk_MNC.shape[0] // config.n_kv_heads * dk_MNC.shape[1], width)
    dq, dk, dv = _parts(dqkv_TW, positions, config)
    for grad, out in ((dq_MRC, dq), (dk_MNC, dk)):
        _rotate(grad.view(out.shape), _swapped(grad, config.head_dim).view(out.shape), positions, -1, out)
    dv.copy_(dv_MNC.view(dv.shape))
    return dqkv_TW


def by_kv_heads(x_TH: Tensor, positions: Positions, config: ModelConfig) -> Tensor:
    """[T, H C] -> [M, R, C], contiguous."""
    x_BNKGC = x_TH.view(
        -1, len(positions.cos_NL), config.n_kv_heads, config.n_heads // config.n_kv_heads, config.head_dim
    )
    return x_BNKGC.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def from_kv_heads(x_MRC: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of by_kv_heads()."""
    group, n_kv = config.n_heads // config.n_kv_heads, config.n_kv_heads
    x_BKNGC = x_MRC.view(-1, n_kv, x_MRC.shape[1] // group, group, config.head_dim)
    return x_BKNGC.transpose(1, 2).flatten(2).flatten(0, 1)
