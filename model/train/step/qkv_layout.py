"""Between a product and attention: heads apart and whole in memory, queries and keys turned; and back. No weights.

A head is turned as x cos + swapped(x) sin, its halves swapped by a copy: the inner loops are then as long as the heads
that share a kv head, not half of one (preset small: 2 % of a gradient's time, where half by half it took 6 %).

Shape legend: T tokens, H query heads, K kv heads, G = H / K, C head_dim, F its half, B sequences, N tokens of each,
M = B K, R = N G rows of queries, L = G C or C, W = (H + 2 K) C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig
from model.train.step.causal_attention import Tile


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
