"""Between a product and attention: heads apart and whole in memory, queries and keys turned; and back. No weights.

Shape legend: T tokens, H query heads, K kv heads, G = H / K, C head_dim, F its half, B sequences, N tokens of each,
M = B K, R = N G rows of queries, W = (H + 2 K) C.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.config import ModelConfig
from model.train.causal import Tile


@dataclass(frozen=True, slots=True)
class Positions:
    """Of the tokens of a micro-batch; all sequences are equally long."""

    cos_1N1F: Tensor
    sin_1N1F: Tensor
    tiles: list[Tile]


def _parts(qkv_TW: Tensor, at: Positions, config: ModelConfig) -> list[Tensor]:
    """q, k, v [B, K, N, G or 1, C] as they lie in the product."""
    length, n_kv = at.cos_1N1F.shape[1], config.n_kv_heads
    sizes = [heads * config.head_dim for heads in (config.n_heads, n_kv, n_kv)]
    parts = qkv_TW.unflatten(0, (-1, length)).split(sizes, dim=-1)
    return [part.unflatten(-1, (n_kv, -1, config.head_dim)).transpose(1, 2) for part in parts]


def _turn(x_BKNGC: Tensor, cos_1N1F: Tensor, sin_1N1F: Tensor, out_BKNGC: Tensor) -> None:
    """Writes x with each pair (i, i + F) turned."""
    first, second = x_BKNGC.chunk(2, dim=-1)
    for out, along, across, sign in zip(
        out_BKNGC.chunk(2, dim=-1), (first, second), (second, first), (-1, 1), strict=True
    ):
        torch.mul(along, cos_1N1F, out=out)
        out.addcmul_(across, sin_1N1F, value=sign)


def to_heads(qkv_TW: Tensor, at: Positions, config: ModelConfig) -> list[Tensor]:
    """q [M, R, C], k and v [M, N, C], whole in memory; q and k turned."""
    found = []
    for part, turned in zip(_parts(qkv_TW, at, config), (True, True, False), strict=True):
        out = torch.empty(part.shape, dtype=part.dtype, device=part.device)
        if turned:
            _turn(part, at.cos_1N1F, at.sin_1N1F, out)
        else:
            out.copy_(part)
        found.append(out.flatten(2, 3).flatten(0, 1))
    return found


def from_heads(dq_MRC: Tensor, dk_MNC: Tensor, dv_MNC: Tensor, at: Positions, config: ModelConfig) -> Tensor:
    """The gradient of the product that to_heads was given."""
    width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    dqkv_TW = dq_MRC.new_empty(dk_MNC.shape[0] // config.n_kv_heads * dk_MNC.shape[1], width)
    dq, dk, dv = _parts(dqkv_TW, at, config)
    _turn(dq_MRC.view(dq.shape), at.cos_1N1F, -at.sin_1N1F, dq)
    _turn(dk_MNC.view(dk.shape), at.cos_1N1F, -at.sin_1N1F, dk)
    dv.copy_(dv_MNC.view(dv.shape))
    return dqkv_TW


def by_kv_heads(x_TH: Tensor, at: Positions, config: ModelConfig) -> Tensor:
    """[T, H C] -> [M, R, C], whole in memory."""
    x_BNKGC = x_TH.view(
        -1, at.cos_1N1F.shape[1], config.n_kv_heads, config.n_heads // config.n_kv_heads, config.head_dim
    )
    return x_BNKGC.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def from_kv_heads(x_MRC: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of by_kv_heads."""
    group, n_kv = config.n_heads // config.n_kv_heads, config.n_kv_heads
    x_BKNGC = x_MRC.view(-1, n_kv, x_MRC.shape[1] // group, group, config.head_dim)
    return x_BKNGC.transpose(1, 2).flatten(2).flatten(0, 1)
