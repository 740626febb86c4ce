"""Attention over the paged cache in plain torch: every tile with all positions that there may be. Knows no model.

Everything is computed in float64 and rounded once, so that no order of sums shows in the result: a row comes out the
same alone, in any batch and in any chunk. Shape legend: as in interface.py; N tokens of a tile, G = H / K, L positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import SPLIT, AttentionBatch, AttentionSpec


def attention(q_THC: Tensor, layer_cache: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
    """See Kernels.attention."""
    n_kv_heads, head_dim = layer_cache.shape[3:]
    tokens_XN, positions_XN, seen_XN = _tile_tokens(batch, len(q_THC))
    k_XLKC, v_XLKC, known_XL = _keys_and_values(layer_cache, batch, spec.window)
    q_XNKGC = q_THC.double()[tokens_XN.clamp(max=len(q_THC) - 1)].unflatten(2, (n_kv_heads, -1))
    scores_XKGNL = torch.einsum("xnkgc,xlkc->xkgnl", q_XNKGC, k_XLKC) * head_dim**-0.5
    if spec.soft_cap is not None:
        scores_XKGNL = spec.soft_cap * torch.tanh(scores_XKGNL / spec.soft_cap)
    looks_XNL = _looks(positions_XN, known_XL, spec.window) & seen_XN[:, :, None]
    scores_XKGNL = scores_XKGNL.masked_fill(~looks_XNL[:, None, None], float("-inf"))
    weights_XKGNL = scores_XKGNL.softmax(-1).nan_to_num(0.0)  # a token that is none looks at nothing
    out_XNKGC = torch.einsum("xkgnl,xlkc->xnkgc", weights_XKGNL, v_XLKC)
    return _scatter(out_XNKGC.flatten(2, 3).to(q_THC.dtype), tokens_XN, q_THC)


def _tile_tokens(batch: AttentionBatch, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """[X, N] each: indices in T (`count` where there is no token), positions, and whether there is a token."""
    steps_N = torch.arange(batch.tile_tokens, device=batch.tile_row_X.device)
    there_XN = (steps_N < batch.tile_length_X[:, None]) & (batch.tile_row_X[:, None] >= 0)
    tokens_XN = (batch.tile_start_X[:, None] + steps_N).where(there_XN, count)
    return tokens_XN, (batch.tile_position_X[:, None] + steps_N).where(there_XN, -1), there_XN


def _keys_and_values(layer_cache: Tensor, batch: AttentionBatch, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """k and v [X, L, K, C] of each tile's sequence, zeros where none of its tokens looks; and [X, L] where one does."""
    block_size, n_blocks = layer_cache.shape[2], batch.block_table_RB.shape[1]
    length = min(batch.max_splits * SPLIT, n_blocks * block_size)
    places_L = torch.arange(length, device=layer_cache.device)
    stops_X1 = (batch.tile_position_X + batch.tile_length_X)[:, None]
    known_XL = (places_L < stops_X1) & (batch.tile_row_X[:, None] >= 0)
    if window is not None:
        known_XL = known_XL & (places_L > batch.tile_position_X[:, None] - window)
    blocks_XL = batch.block_table_RB[batch.tile_row_X.clamp(min=0).long()][:, places_L // block_size]
    slots_XL = (blocks_XL.long() * block_size + places_L % block_size).where(known_XL, 0)
    rows_YKC = layer_cache.flatten(1, 2)[:, slots_XL.flatten()].double()
    k_XLKC, v_XLKC = rows_YKC.unflatten(1, slots_XL.shape).masked_fill(~known_XL[:, :, None, None], 0.0)
    return k_XLKC, v_XLKC, known_XL


def _looks(positions_XN: Tensor, known_XL: Tensor, window: int | None) -> Tensor:
    """[X, N, L]: whether a token may look at a place."""
    places_L = torch.arange(known_XL.shape[1], device=known_XL.device)
    looks_XNL = known_XL[:, None] & (places_L <= positions_XN[:, :, None])
    return looks_XNL if window is None else looks_XNL & (places_L > positions_XN[:, :, None] - window)


def _scatter(out_XNHC: Tensor, tokens_XN: Tensor, q_THC: Tensor) -> Tensor:
    """Each token's row to where it stands in q_THC, which is returned; what is no token falls off the end."""
    rows_THC = torch.cat((q_THC, q_THC[:1]))
    rows_THC[tokens_XN.flatten()] = out_XNHC.flatten(0, 1)
    return q_THC.copy_(rows_THC[:-1])
